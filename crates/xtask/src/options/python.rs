//! Python: classes of options, signatures, docstrings, and what the extension module reads.

use super::{
    AttentionOption, GROUPS, OptionGroup, OptionKind, PythonParameter, WRITTEN, array, region,
    setters, uncapitalized, wrapped,
};

/// Functions and classes whose signature has options.
const SIGNATURES: [&str; 4] = ["Plan", "Cache", "flash_attention", "ring_attention"];

impl PythonParameter {
    /// True if a signature has it, not only the extension module.
    pub(super) fn is_declared(&self) -> bool {
        !self.places.is_empty() || self.check.is_none()
    }
}

impl AttentionOption {
    /// Name of the parameter.
    pub(super) fn parameter<'a>(&'a self, parameter: &'a PythonParameter) -> &'a str {
        parameter.name.as_deref().unwrap_or(&self.name)
    }

    /// Name in the dict that the extension module reads.
    fn key<'a>(&'a self, parameter: &'a PythonParameter) -> &'a str {
        parameter.config.as_deref().unwrap_or(self.parameter(parameter))
    }

    /// Annotation and default: `int | None = None`.
    fn annotation(&self, parameter: &PythonParameter) -> String {
        let form = self.form(self.kind.forms().python[0], &self.name).unwrap_or_default();
        let (kind, default) = form.split_once(" = ").unwrap_or_default();
        let kind = parameter.kind.as_deref().unwrap_or(kind);
        format!("{kind} = {}", parameter.default.as_deref().unwrap_or(default))
    }

    /// Expression of the checked value.
    fn check(&self, parameter: &PythonParameter) -> Option<String> {
        let form = self.form(self.kind.forms().python[1], self.parameter(parameter));
        parameter.check.clone().or(form)
    }

    /// Type in the extension module.
    fn config_type(&self, parameter: &PythonParameter) -> Option<String> {
        parameter.rust.clone().or(self.form(self.kind.forms().module[0], &self.name))
    }

    /// Line of a docstring.
    fn documentation(&self, parameter: &PythonParameter) -> String {
        let mut text = self.meaning(parameter.meaning.as_ref());
        if let (OptionKind::Choice, Some(values)) = (self.kind, &self.values) {
            text.push('.');
            for (number, (name, meaning)) in values.all.iter().enumerate() {
                let default = if number == 0 { " (default)" } else { "" };
                let meaning = uncapitalized(meaning);
                text += &format!(" ``{name}``{default}: {meaning}");
            }
        }
        if let Some(default) = self.default_in_words().filter(|_| !text.contains("Default:")) {
            text += &format!(" Default: {default}.");
        }
        wrapped(&text, &format!("        {}: ", self.parameter(parameter)), "            ")
    }
}

/// Options with a parameter in a place.
fn parameters<'a>(
    options: &'a [AttentionOption],
    place: &'a str,
) -> impl Iterator<Item = (&'a AttentionOption, &'a PythonParameter)> {
    options.iter().filter_map(move |option| {
        let parameter = option.python.as_ref()?;
        parameter.places.iter().any(|name| name == place).then_some((option, parameter))
    })
}

/// `python/src/option_fields.rs`.
pub(super) fn rust(options: &[AttentionOption]) -> String {
    let mut used: Vec<&str> = options
        .iter()
        .filter(|option| option.kind == OptionKind::Choice)
        .filter_map(|option| option.values.as_ref()?.name.as_deref())
        .chain(["Attention", "Division", "Runtime"])
        .collect();
    used.sort_unstable();
    let mut text = format!(
        "//! The checked options of an attention and a plan, and the setters of the simple ones.
//! {WRITTEN}\n
use annulus::{{{}}};
use pyo3::{{prelude::*, types::PyDict}};\n
use crate::{{
    config::{{LayoutConfig, choice, seconds}},
    masks::{{BiasFunction, Mask}},
}};\n
/// An attention and what is planned around it.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Config<'py> {{
    pub(crate) dtype: String,\n",
        used.join(", ")
    );
    for option in options {
        let Some(parameter) = &option.python else { continue };
        if let Some(kind) = option.config_type(parameter) {
            text += &format!("    pub(crate) {}: {kind},\n", option.key(parameter));
        }
    }
    text += "}\n";
    for option in options.iter().filter(|option| option.kind == OptionKind::Choice) {
        let all: Vec<_> = option.variants().collect();
        let kind = format!("(&str, {})", all[0].1.split(':').next().unwrap_or(""));
        let pairs: Vec<String> =
            all.iter().map(|(name, variant)| format!("(\"{name}\", {variant})")).collect();
        text += &format!("\n/// Names of `{}`.\n", option.name);
        text += &array(&option.values_name(), &kind, &pairs);
    }
    text += "\nimpl Config<'_> {\n";
    let methods = GROUPS.map(|(group, name, builder)| {
        let read = |option: &AttentionOption| {
            let parameter = option.python.as_ref()?;
            let form = option.form(option.kind.forms().module[1], option.key(parameter));
            parameter.set.clone().or(form)
        };
        let body = setters(options, group, "        Ok(builder", read, ")");
        let body = body.unwrap_or("        Ok(builder)".to_owned());
        let py = if body.contains("(py,") { "py" } else { "_py" };
        format!(
            "    /// Sets the options of {name} whose form is that of all languages.
    pub(crate) fn set_{name}(&self, {py}: Python<'_>, builder: {builder}) -> PyResult<{builder}> {{
{body}\n    }}\n"
        )
    });
    text += &methods.join("\n");
    text + "}\n"
}

/// `python/annulus/_option_fields.py`.
pub(super) fn classes(options: &[AttentionOption]) -> String {
    let mut text = format!(
        "\"\"\"The options of an attention and a plan.\n\n{WRITTEN}\n\"\"\"\n
from __future__ import annotations\n
from dataclasses import dataclass
from typing import Any\n
from . import _check
from ._annulus import BiasFunction, Mask
from ._check import Documents, Machine, Rows\n\n"
    );
    for option in options.iter().filter(|option| option.kind == OptionKind::Choice) {
        let values = option.values.iter().flat_map(|values| &values.all);
        let names: Vec<String> = values.map(|(name, _)| format!("\"{name}\"")).collect();
        text += &format!("{} = ({})\n", option.values_name(), names.join(", "));
    }
    for (class, place, documentation) in [
        ("AttentionOptions", "Attention", "The options of ``Attention``."),
        ("PlanOptions", "Plan", "The options of ``Plan``: the division among ranks, and the run."),
    ] {
        text += &format!(
            "\n\n@dataclass(frozen=True, kw_only=True)
class {class}:\n    \"\"\"{documentation}\"\"\"\n\n"
        );
        for (option, parameter) in parameters(options, place) {
            let name = option.parameter(parameter);
            text += &format!("    {name}: {}\n", option.annotation(parameter));
        }
        text += "
    def checked(self) -> dict[str, Any]:
        \"\"\"Returns the checked options, by the names of the extension module.\"\"\"
        return {\n";
        // options without a place, such as the sides of the window, are checked with the first
        let is_part = |option: &AttentionOption, parameter: &PythonParameter| {
            place == "Attention"
                && option.group == OptionGroup::Mathematics
                && parameter.places.is_empty()
        };
        for option in options {
            let Some(parameter) = &option.python else { continue };
            let is_here = parameter.places.iter().any(|name| name == place);
            if let Some(check) =
                option.check(parameter).filter(|_| is_here || is_part(option, parameter))
            {
                let key = option.key(parameter);
                let line = format!("            \"{key}\": {check},\n");
                if line.len() > 101 {
                    text += &format!(
                        "            \"{key}\": (\n                {check}\n            ),\n"
                    );
                } else {
                    text += &line;
                }
            }
        }
        text += "        }\n";
    }
    text
}

/// The signatures of a file, and the docstrings of its classes.
pub(super) fn regions(options: &[AttentionOption], text: &str) -> String {
    let mut text = text.to_owned();
    for place in SIGNATURES {
        if text.contains(&format!("options.toml: {place}\n")) {
            text = region(&text, place, |before| signature(options, place, before));
        }
    }
    for (class, heading) in [("Attention", "Attributes"), ("Plan", "Keyword Args")] {
        let Some(start) = text.find(&format!("\nclass {class}")) else { continue };
        let heading = format!("    {heading}:\n");
        let start = start + text[start..].find(&heading).expect("a heading") + heading.len();
        let end = start + text[start..].find("    \"\"\"").expect("an end of the docstring");
        let lines: String = parameters(options, class)
            .map(|(option, parameter)| option.documentation(parameter))
            .collect();
        text.replace_range(start..end, &lines);
    }
    text
}

/// Parameters of a place, except for those that are declared before the region.
fn signature(options: &[AttentionOption], place: &str, before: &str) -> String {
    let last = before.trim_end_matches('\n').rsplit('\n').next().unwrap_or("");
    let indent = &last[..last.len() - last.trim_start().len()];
    let declared = &before[before.rfind("def ").unwrap_or(0)..];
    let lines = parameters(options, place).map(|(option, parameter)| {
        format!("{indent}{}: {},\n", option.parameter(parameter), option.annotation(parameter))
    });
    lines
        .filter(|line| !declared.contains(&format!("\n{}:", line.split(':').next().unwrap_or(""))))
        .collect()
}
