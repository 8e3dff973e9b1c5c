//! The command: structs of flags, their help and setters.

use super::{AttentionOption, Flag, GROUPS, OptionKind, WRITTEN, ascii, camel, setters, wrapped};

/// Structs of flags, with their documentation and the heading of their help.
const STRUCTS: [(&str, &str, Option<&str>); 5] = [
    (
        "MaskFlags",
        "Mask flags. A pair is visible if every condition holds.",
        Some("Mask (a pair is visible if every condition holds)"),
    ),
    ("ScoreFlags", "Flags of the scores and probabilities.", Some("Scores and probabilities")),
    (
        "OutputFlags",
        "Flags of the outputs that a KV cache does not have.",
        Some("Scores and probabilities"),
    ),
    ("DivisionFlags", "Flags of the division among ranks.", None),
    ("RuntimeFlags", "Flags of the run.", None),
];

impl AttentionOption {
    /// Name of the flag, without the hyphens before it.
    pub(super) fn flag(&self, flag: &Flag) -> String {
        flag.flag.clone().unwrap_or_else(|| self.name.replace('_', "-"))
    }

    fn attributes(&self, flag: &Flag) -> String {
        let mut parts = vec!["long".to_owned()];
        if let Some(value) = &flag.value {
            parts.push(format!("value_name = \"{value}\""));
        }
        if let (OptionKind::Choice, Some(values)) = (self.kind, &self.values) {
            let first = values.all[0].0.replace('_', "-");
            parts.push(format!("value_enum, default_value = \"{first}\""));
        }
        let form = self.form(self.kind.forms().flag[1], "");
        if let Some(parser) = flag.parser.clone().or(form) {
            parts.push(format!("value_parser = {parser}"));
        }
        parts.extend(flag.more.clone());
        let line = format!("    #[arg({})]\n", parts.join(", "));
        if line.len() <= 101 {
            return line;
        }
        let (last, first) = parts.split_last().expect("long");
        format!("    #[arg({},\n        {last})]\n", first.join(", "))
    }

    /// Help: clap prints the default of flags that have one.
    fn help(&self, flag: &Flag) -> String {
        let text = self.meaning(flag.meaning.as_ref());
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

/// `crates/cli/src/arguments/option_flags.rs`.
pub(super) fn flags(options: &[AttentionOption]) -> String {
    let mut text = format!("//! Flags of the options of an attention.\n//! {WRITTEN}\n");
    text += "
use std::{path::PathBuf, time::Duration};

use annulus::{Alignment, Attention, Division, Precision, Strategy};
use clap::{Args, ValueEnum};

use super::values::{
    LayoutName, WindowSides, count, count_u64, finite, positive, probability, silence, strategy,
    threads, whole_u64,
};
use crate::input::SinksForm;
";
    let in_struct = |name: &'static str| {
        options.iter().filter_map(move |option| {
            let flag = option.command.as_ref()?;
            (flag.place.as_deref() == Some(name)).then_some((option, flag))
        })
    };
    for (name, documentation, heading) in STRUCTS {
        text += &format!("\n/// {documentation}\n#[derive(Debug, Clone, Args)]\n");
        if let Some(heading) = heading {
            text += &format!("#[command(next_help_heading = \"{heading}\")]\n");
        }
        text += &format!("pub(crate) struct {name} {{\n");
        for (option, flag) in in_struct(name) {
            text += &wrapped(&option.help(flag), "    /// ", "    /// ");
            text += &option.attributes(flag);
            let field = option.flag(flag).replace('-', "_");
            let form = option.form(option.kind.forms().flag[0], "");
            let kind = flag.kind.clone().or(form).unwrap_or_default();
            text += &format!("    pub(crate) {field}: {kind},\n");
        }
        text += "}\n";
        for (group, group_name, builder) in GROUPS {
            let read = |option: &AttentionOption| {
                let flag = option.command.as_ref()?;
                let field = option.flag(flag).replace('-', "_");
                let value = option.form(option.kind.forms().flag[2], &field);
                value.filter(|_| flag.place.as_deref() == Some(name))
            };
            let body = setters(options, group, "        builder", read, "");
            let Some(body) = body else { continue };
            text += &format!(
                "
impl {name} {{
    /// Sets the flags of {group_name} that no other flag and no file changes.
    pub(crate) fn set_{group_name}(&self, builder: {builder}) -> {builder} {{
{body}\n    }}\n}}\n"
            );
        }
    }
    for option in options.iter().filter(|option| option.kind == OptionKind::Choice) {
        let Some(values) = &option.values else { continue };
        if option.command.as_ref().is_none_or(|flag| flag.place.is_none()) {
            continue;
        }
        let (name, kind) = (camel(&option.name), values.name.as_deref().unwrap_or(""));
        text += &format!("\n/// Names of the values of {kind}.\n#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum {name}Name {{\n"
        );
        for (value, meaning) in &values.all {
            text += &wrapped(meaning, "    /// ", "    /// ");
            text += &format!("    {},\n", camel(value));
        }
        text += &format!(
            "}}\n\nimpl From<{name}Name> for {kind} {{\n    fn from(name: {name}Name) -> Self {{
        match name {{\n"
        );
        for (value, _) in &values.all {
            let value = camel(value);
            text += &format!("            {name}Name::{value} => Self::{value},\n");
        }
        text += "        }\n    }\n}\n";
    }
    text += "
/// Options of the library and the flags that set them.
pub(super) const FLAGS: &[(&str, &str)] = &[
";
    for option in options {
        if let Some(flag) = &option.command {
            let flag = option.flag(flag);
            text += &format!("    (\"{}\", \"--{flag}\"),\n", option.name);
        }
    }
    text + "];\n"
}
