//! `cargo xtask options` writes from `options.toml` what each language has of the options of an
//! attention: whole files, and regions between `options.toml: NAME` and `options.toml: end`.
//!
//! [`AttentionOption::complete`] fills in what an entry leaves out, from the forms of its type; the
//! templates, one for each language, only lay it out.

use std::{collections::BTreeMap, fs};

use minijinja::{
    Environment, Error as TemplateError, Value, context, syntax::SyntaxConfig, value::Serde,
};
use serde::{Deserialize, Serialize};

use crate::{Result, root};

/// Line of a file that is written as a whole, after the characters of a comment.
const WRITTEN: &str = "Written from options.toml by `cargo xtask options`.";

/// Files that are written as a whole, with their templates.
const FILES: [(&str, &str); 4] = [
    ("crates/capi/src/option_fields.rs", "capi.rs"),
    ("crates/cli/src/arguments/option_flags.rs", "command.rs"),
    ("python/src/option_fields.rs", "module.rs"),
    ("python/annulus_attention/_option_fields.py", "package.py"),
];

/// Files with regions, or with a class whose docstring has the options below a heading.
const REGIONS: [(&str, Option<(&str, &str)>); 6] = [
    ("crates/capi/fortran/annulus.f90", None),
    ("docs/semantics.md", None),
    ("python/annulus_attention/_attention.py", Some(("Attention", "Attributes"))),
    ("python/annulus_attention/_plan.py", Some(("Plan", "Keyword Args"))),
    ("python/annulus_attention/_cache.py", None),
    ("python/annulus_attention/_calls.py", None),
];

/// Groups, with the builder that has their setters.
const GROUPS: [(&str, &str); 3] =
    [("mathematics", "Attention"), ("division", "Division"), ("runtime", "Runtime")];

/// `options.toml`, which describes the keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OptionTable {
    #[serde(rename = "type")]
    types: BTreeMap<String, Forms>,
    option: Vec<AttentionOption>,
}

/// Forms of a type in the languages, in which `$n` is the name of the field, parameter or flag.
#[derive(Deserialize, Default)]
#[serde(deny_unknown_fields)]
struct Forms {
    /// Type of the field, value of the setter.
    c: [String; 2],
    /// Annotation, default and check of the parameter.
    python: [String; 3],
    /// Type in the extension module, value of the setter.
    module: [String; 2],
    /// Type of the flag, its parser, value of the setter.
    command: [String; 3],
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct AttentionOption {
    name: String,
    set: Option<String>,
    group: String,
    #[serde(rename = "type")]
    kind: String,
    meaning: String,
    default: Option<String>,
    since: Option<String>,
    #[serde(default = "u64_name")]
    integer: String,
    values: Option<OptionValues>,
    c: Option<CField>,
    python: Option<PythonParameter>,
    command: Option<Flag>,
}

fn u64_name() -> String {
    "u64".to_owned()
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct OptionValues {
    #[serde(rename = "type")]
    kind: Option<String>,
    prefix: String,
    /// Names and meanings, in the order of their numbers.
    all: Vec<(String, String)>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct CField {
    name: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    zero: Option<String>,
    meaning: Option<String>,
    /// Call of the builder's method.
    #[serde(skip_deserializing)]
    call: Option<String>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct PythonParameter {
    #[serde(rename = "in", default)]
    places: Vec<String>,
    name: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    default: Option<String>,
    check: Option<String>,
    config: Option<String>,
    rust: Option<String>,
    set: Option<String>,
    meaning: Option<String>,
    #[serde(skip_deserializing)]
    call: Option<String>,
}

#[derive(Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
struct Flag {
    #[serde(rename = "in")]
    place: Option<String>,
    flag: Option<String>,
    value: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    parser: Option<String>,
    more: Option<String>,
    meaning: Option<String>,
    #[serde(skip_deserializing)]
    field: String,
    #[serde(skip_deserializing)]
    attributes: Vec<String>,
    #[serde(skip_deserializing)]
    call: Option<String>,
}

impl AttentionOption {
    /// Fills in what the entry leaves out: names, and the forms and the meaning in each language.
    fn complete(mut self, types: &BTreeMap<String, Forms>) -> Result<Self> {
        let none = Forms::default();
        let forms = match types.get(&self.kind) {
            Some(forms) => forms,
            None if self.kind == "other" => &none,
            None => return Err(format!("{}: got the type {}", self.name, self.kind)),
        };
        self.set.get_or_insert(self.name.clone());
        let (mut c, mut python, mut command) =
            (self.c.take(), self.python.take(), self.command.take());
        if let Some(c) = &mut c {
            let name = c.name.get_or_insert(self.name.clone()).clone();
            c.kind = c.kind.take().or(self.form(&forms.c[0], &name)).or(Some("i64".to_owned()));
            c.call = self.form(&forms.c[1], &name).map(|value| self.call(&value));
            c.zero = c.zero.take().or((self.kind == "optional").then(|| "ANNULUS_NONE".to_owned()));
            c.meaning = Some(ascii(&self.c_meaning(c.meaning.as_deref())));
        }
        if let Some(python) = &mut python {
            let name = python.name.get_or_insert(self.name.clone()).clone();
            let key = python.config.get_or_insert(name.clone()).clone();
            let [kind, default, check] = &forms.python;
            python.kind = python.kind.take().or(self.form(kind, &name));
            python.default = python.default.take().or(self.form(default, &name));
            python.check = python.check.take().or(self.form(check, &name));
            python.rust = python.rust.take().or(self.form(&forms.module[0], &key));
            let value = python.set.take().or(self.form(&forms.module[1], &key));
            python.call = value.map(|value| self.call(&value));
            python.meaning = Some(self.python_meaning(python.meaning.as_deref()));
        }
        if let Some(flag) = &mut command {
            let name = flag.flag.get_or_insert(self.name.replace('_', "-"));
            flag.field = name.replace('-', "_");
            let [kind, parser, value] = &forms.command;
            flag.kind = flag.kind.take().or(self.form(kind, &flag.field));
            flag.parser = flag.parser.take().or(self.form(parser, &flag.field));
            flag.call = self.form(value, &flag.field).map(|value| self.call(&value));
            flag.attributes = self.attributes(flag);
            flag.meaning = Some(self.help(flag));
        }
        Ok(Self { c, python, command, ..self })
    }

    /// A form with the names of this option; `None` for an empty one.
    fn form(&self, form: &str, name: &str) -> Option<String> {
        let first = self.values.as_ref().map_or("", |values| &values.all[0].0);
        let form =
            form.replace("$n", name).replace("$v", &format!("{}S", self.name.to_uppercase()));
        let form = form.replace("$i", &self.integer).replace("$1", first);
        Some(form.replace("$t", &camel(&self.name))).filter(|form| !form.is_empty())
    }

    /// Call of the builder's method.
    fn call(&self, value: &str) -> String {
        format!(".{}({value})", self.set.as_deref().unwrap_or(&self.name))
    }

    /// Default in words, unless it is that there is none.
    fn default_in_words(&self) -> Option<&str> {
        self.default.as_deref().filter(|default| *default != "none")
    }

    /// Meaning in one language, with the version that has added the option.
    fn meaning(&self, own: Option<&str>) -> String {
        let default = self.default.as_deref().unwrap_or("");
        let mut text = own.unwrap_or(&self.meaning).replace("{default}", default);
        if let Some(since) = &self.since {
            text += &format!(" Since {since}.");
        }
        text
    }

    /// Names of the constants of the values in C.
    fn constants(&self) -> impl Iterator<Item = String> {
        self.values.iter().flat_map(|OptionValues { prefix, all, .. }| {
            let constant = move |name: &str| format!("ANNULUS_{prefix}_{}", name.to_uppercase());
            all.iter().map(move |(name, _)| constant(name))
        })
    }

    /// Meaning in C, with the values in words: `ANNULUS_X_A (default), B or C`.
    fn c_meaning(&self, own: Option<&str>) -> String {
        let text = self.meaning(own);
        if let Some(values) = &self.values {
            let names: Vec<_> = values.all.iter().map(|(name, _)| name.to_uppercase()).collect();
            let (last, others) = names[1..].split_last().expect("two values");
            let others: String = others.iter().map(|name| format!(", {name}")).collect();
            let default = self.constants().next().unwrap_or_default();
            let (first, rest) = text.split_once(". ").unwrap_or((text.trim_end_matches('.'), ""));
            let text = format!("{first}: {default} (default){others} or {last}. {rest}");
            return text.trim_end().to_owned();
        }
        if own.is_some() || text.contains("Default:") {
            return text;
        }
        match (self.kind.as_str(), self.default_in_words()) {
            ("flag", _) => format!("Flag: {} Default: 0.", uncapitalized(&text)),
            ("count", _) => format!("{text} Default: 0."),
            ("optional", Some(default)) => format!("{text} Default: ANNULUS_NONE, {default}."),
            ("other", Some(_)) if text.contains("(default)") => text,
            ("other", Some(default)) => format!("{text} Default: {default}."),
            (_, Some(default)) => format!("{text} Default: 0, which is {default}."),
            (_, None) => text,
        }
    }

    /// Meaning in a docstring, with the values of a choice.
    fn python_meaning(&self, own: Option<&str>) -> String {
        let mut text = self.meaning(own);
        if let ("choice", Some(values)) = (self.kind.as_str(), &self.values) {
            text.push('.');
            for (number, (name, meaning)) in values.all.iter().enumerate() {
                let default = if number == 0 { " (default)" } else { "" };
                text += &format!(" ``{name}``{default}: {}", uncapitalized(meaning));
            }
        }
        match self.default_in_words() {
            Some(default) if !text.contains("Default:") => format!("{text} Default: {default}."),
            _ => text,
        }
    }

    /// Parts of the attribute of a flag's field.
    fn attributes(&self, flag: &Flag) -> Vec<String> {
        let mut parts = vec!["long".to_owned()];
        parts.extend(flag.value.iter().map(|name| format!("value_name = \"{name}\"")));
        if let ("choice", Some(values)) = (self.kind.as_str(), &self.values) {
            let first = values.all[0].0.replace('_', "-");
            parts.push(format!("value_enum, default_value = \"{first}\""));
        }
        parts.extend(flag.parser.iter().map(|parser| format!("value_parser = {parser}")));
        parts.extend(flag.more.clone());
        parts
    }

    /// Help of a flag: clap prints the default of flags that have one.
    fn help(&self, flag: &Flag) -> String {
        let text = self.meaning(flag.meaning.as_deref());
        let text = ascii(text.trim_end_matches('.'));
        let has_default = flag.more.iter().any(|more| more.contains("default_value"));
        match self.default_in_words() {
            Some(default) if !has_default && flag.meaning.is_none() => {
                format!("{text}. Default: {default}")
            }
            _ => text,
        }
    }
}

/// Writes the files; with `check` compares them instead.
///
/// # Errors
/// A text that names a file that cannot be read or, with `check`, that differs.
pub(crate) fn run(check: bool) -> Result<()> {
    let table: OptionTable =
        toml::from_str(&read("options.toml")?).map_err(|error| format!("options.toml: {error}"))?;
    let options = table.option.into_iter().map(|option| option.complete(&table.types));
    let options = options.collect::<Result<Vec<_>>>()?;
    let failed = |error: TemplateError| format!("{error:#}");
    let mut templates = templates(&options).map_err(failed)?;
    for name in ["layout", "regions"].into_iter().chain(FILES.map(|(_, name)| name)) {
        let text = read(&format!("crates/xtask/templates/{name}.jinja"))?;
        templates.add_template_owned(name, text).map_err(failed)?;
    }
    let write = |name: &str, written: String| {
        let present = if root().join(name).exists() { read(name)? } else { String::new() };
        if check && written != present {
            return Err(format!("{name} is not that of options.toml: run `cargo xtask options`"));
        }
        if written != present {
            fs::write(root().join(name), written).map_err(|error| format!("{name}: {error}"))?;
        }
        Ok(())
    };
    for (name, template) in FILES {
        let written = templates.get_template(template).and_then(|file| file.render(()));
        write(name, written.map_err(failed)?)?;
    }
    for (name, class) in REGIONS {
        write(name, regions(&templates, &read(name)?, class).map_err(failed)?)?;
    }
    Ok(())
}

/// Reads a file of the repository.
fn read(name: &str) -> Result<String> {
    fs::read_to_string(root().join(name)).map_err(|error| format!("{name}: {error}"))
}

/// Templates to come, with the options and the functions that lay them out.
fn templates(options: &[AttentionOption]) -> Result<Environment<'static>, TemplateError> {
    let mut templates = Environment::new();
    let mut syntax = SyntaxConfig::builder();
    syntax.trim_blocks(true).lstrip_blocks(true).keep_trailing_newline(true);
    templates.set_syntax(syntax.build()?);
    let is_choice = |option: &&AttentionOption| option.kind == "choice";
    let choices: Vec<_> = options.iter().filter(is_choice).collect();
    templates.add_global("written", WRITTEN);
    templates.add_global("groups", Value::from(Serde(GROUPS)));
    templates.add_global("options", Value::from(Serde(options)));
    templates.add_global("choices", Value::from(Serde(choices)));
    templates.add_filter("ascii", |text: &str| ascii(text));
    templates.add_filter("camel", |name: &str| camel(name));
    templates.add_filter("wrap", |text: &str, first: &str, next: Option<&str>| {
        wrapped(text, first, next.unwrap_or(first))
    });
    let fits = |line: &str| line.chars().count() <= 100;
    // a line, or the form of more lines if it is too long
    templates.add_filter("fit", move |line: String, long| if fits(&line) { line } else { long });
    Ok(templates)
}

/// Replaces the regions of a text, and the options below the heading of a class's docstring.
fn regions(
    templates: &Environment<'_>,
    text: &str,
    class: Option<(&str, &str)>,
) -> Result<String, TemplateError> {
    let template = templates.get_template("regions")?;
    let render = |block: &str, place: &str, indent: &str| {
        let mut captured = template.render_captured(context! { place, indent })?;
        captured.with_state_mut(|state| state.render_block(block))
    };
    let mut written = String::new();
    let mut rest = text;
    while let Some(start) = rest.find("options.toml: ") {
        let line = start + rest[start..].find('\n').map_or(0, |end| end + 1);
        let end = line + rest[line..].find("options.toml: end").expect("an end of the region");
        let end = rest[..end].rfind('\n').map_or(0, |line| line + 1);
        let name = rest[start..line].trim_start_matches("options.toml: ").trim_end();
        written += &rest[..line];
        written += &match name.trim_end_matches(" -->") {
            block @ ("constants" | "fields" | "table") => render(block, "", "")?,
            place => {
                let last = written.trim_end_matches('\n').rsplit('\n').next().unwrap_or("");
                let indent = &last[..last.len() - last.trim_start().len()];
                // without the parameters that are declared before the region
                let declared = &written[written.rfind("def ").unwrap_or(0)..];
                let lines = render("signature", place, indent)?;
                let is_new = |line: &&str| {
                    !declared.contains(&format!("\n{}:", line.split(':').next().unwrap_or("")))
                };
                lines.split_inclusive('\n').filter(is_new).collect()
            }
        };
        let after = end + rest[end..].find('\n').map_or(0, |end| end + 1);
        written += &rest[end..after];
        rest = &rest[after..];
    }
    written += rest;
    if let Some((class, heading)) = class {
        let heading = format!("    {heading}:\n");
        let start = written.find(&format!("\nclass {class}")).expect("a class");
        let start = start + written[start..].find(&heading).expect("a heading") + heading.len();
        let end = start + written[start..].find("    \"\"\"").expect("an end of the docstring");
        written.replace_range(start..end, &render("docstring", class, "")?);
    }
    Ok(written)
}

/// Breaks a text into lines of 100 columns. `first` begins the first line, `next` all others.
fn wrapped(text: &str, first: &str, next: &str) -> String {
    let mut lines = String::new();
    let mut line = first.to_owned();
    let mut is_empty = true;
    for word in text.split_whitespace() {
        if !is_empty && line.chars().count() + 1 + word.chars().count() > 100 {
            lines.push_str(&line);
            lines.push('\n');
            line = next.to_owned();
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    lines + &line
}

/// A text without characters that a terminal or a C compiler may lack.
fn ascii(text: &str) -> String {
    let pairs = [("≤", "<="), ("≥", ">="), ("−", "-"), (" · ", " * "), ("``", "`")];
    let text = pairs.iter().fold(text.to_owned(), |text, (from, to)| text.replace(from, to));
    text.replace("√head_dim", "sqrt(head_dim)").replace(" × ", " x ")
}

/// A sentence as the rest of another one; `KV` stays.
fn uncapitalized(text: &str) -> String {
    let is_word = text.chars().nth(1).is_some_and(char::is_lowercase);
    if is_word { text[..1].to_lowercase() + &text[1..] } else { text.to_owned() }
}

/// `relay_up` as `RelayUp`.
fn camel(name: &str) -> String {
    let word = |word: &str| word[..1].to_uppercase() + &word[1..];
    name.split('_').map(word).collect()
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_language_has_the_options_of_the_table() {
        super::run(true).unwrap_or_else(|error| panic!("{error}"));
    }
}
