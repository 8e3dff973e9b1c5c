//! `cargo xtask options` writes from `options.toml` what each language has of the options of an
//! attention: whole files, and regions between `options.toml: NAME` and `options.toml: end`.

mod c;
mod command;
mod python;

use std::{fs, path::Path};

use serde::Deserialize;

use crate::common::root;

/// First line of a file that is written as a whole, after the characters of a comment.
const WRITTEN: &str = "Written from options.toml by `cargo xtask options`.";

/// A file, and the function that writes it from the options and its present text.
type WrittenFile = (&'static str, fn(&[AttentionOption], &str) -> String);

/// Every file that has options.
const TARGETS: [WrittenFile; 10] = [
    ("crates/capi/src/option_fields.rs", |options, _| c::rust(options)),
    ("crates/capi/fortran/annulus.f90", c::fortran),
    ("docs/semantics.md", c::page),
    ("crates/cli/src/arguments/option_flags.rs", |options, _| command::flags(options)),
    ("python/src/option_fields.rs", |options, _| python::rust(options)),
    ("python/annulus/_option_fields.py", |options, _| python::classes(options)),
    ("python/annulus/_attention.py", python::regions),
    ("python/annulus/_plan.py", python::regions),
    ("python/annulus/_cache.py", python::regions),
    ("python/annulus/_calls.py", python::regions),
];

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OptionTable {
    option: Vec<AttentionOption>,
}

/// One entry of `options.toml`, which describes the keys.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct AttentionOption {
    name: String,
    set: Option<String>,
    group: OptionGroup,
    #[serde(rename = "type")]
    kind: OptionKind,
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

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum OptionGroup {
    Shape,
    Mathematics,
    Division,
    Runtime,
}

/// Groups with the builder that has their setters.
const GROUPS: [(OptionGroup, &str, &str); 3] = [
    (OptionGroup::Mathematics, "mathematics", "Attention"),
    (OptionGroup::Division, "division", "Division"),
    (OptionGroup::Runtime, "runtime", "Runtime"),
];

#[derive(Deserialize, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum OptionKind {
    Flag,
    Count,
    Positive,
    Optional,
    Number,
    Seconds,
    Choice,
    Other,
}

/// Forms of a type in the languages. `$n` is the name of the field, parameter or flag, `$i` the
/// type of the builder's integer, `$v` the list of the values.
struct Forms {
    /// Type of the field of C, and the value of the setter.
    c: [&'static str; 2],
    /// Annotation and default of the parameter of Python, and its check.
    python: [&'static str; 2],
    /// Type in the extension module, and the value of the setter.
    module: [&'static str; 2],
    /// Type of the flag, its parser, and the value of the setter.
    flag: [&'static str; 3],
}

impl OptionKind {
    const fn forms(self) -> Forms {
        match self {
            Self::Flag => Forms {
                c: ["i32", "flag(\"$n\", options.$n)?"],
                python: ["bool = False", "_check.boolean(\"$n\", self.$n)"],
                module: ["bool", "self.$n"],
                flag: ["bool", "", "self.$n"],
            },
            Self::Count => Forms {
                c: ["i64", "count(\"$n\", options.$n)?"],
                python: ["int = 0", "_check.integer(\"$n\", self.$n)"],
                module: ["$i", "self.$n"],
                flag: ["Option<$i>", "whole_$i", "self.$n.unwrap_or(0)"],
            },
            Self::Positive => Forms {
                c: ["i64", "positive(\"$n\", options.$n)?"],
                python: ["int | None = None", "_check.integer_or_none(\"$n\", self.$n, least=1)"],
                module: ["Option<$i>", "self.$n"],
                flag: ["Option<$i>", "count_$i", "self.$n"],
            },
            Self::Optional => Forms {
                c: ["i64", "optional(\"$n\", options.$n)?"],
                python: ["int | None = None", "_check.integer_or_none(\"$n\", self.$n)"],
                module: ["Option<$i>", "self.$n"],
                flag: ["Option<$i>", "whole_$i", "self.$n"],
            },
            Self::Number => Forms {
                c: ["f64", "number(options.$n)"],
                python: ["float | None = None", "_check.number_or_none(\"$n\", self.$n)"],
                module: ["Option<f64>", "self.$n"],
                flag: ["Option<f64>", "finite", "self.$n"],
            },
            Self::Seconds => Forms {
                c: ["f64", "seconds(\"$n\", options.$n)?"],
                python: ["float | None = None", "_check.number_or_none(\"$n\", self.$n)"],
                module: ["Option<f64>", "seconds(py, \"$n\", self.$n)?"],
                flag: ["Option<Duration>", "silence", ""],
            },
            Self::Choice => Forms {
                c: ["i32", "one_of(\"$n\", options.$n, &$v)?"],
                python: ["str = \"$1\"", "_check.choice(\"$n\", self.$n, $v)"],
                module: ["String", "choice(py, \"$n\", &self.$n, &$v)?"],
                flag: ["$tName", "", "self.$n.into()"],
            },
            Self::Other => {
                Forms { c: ["i64", ""], python: ["", ""], module: ["", ""], flag: ["", "", ""] }
            }
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OptionValues {
    #[serde(rename = "type")]
    name: Option<String>,
    prefix: String,
    /// Names and meanings, in the order of their numbers.
    all: Vec<(String, String)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct CField {
    name: Option<String>,
    #[serde(rename = "type")]
    kind: Option<String>,
    zero: Option<String>,
    meaning: Option<String>,
}

#[derive(Deserialize)]
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
}

#[derive(Deserialize)]
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
}

impl AttentionOption {
    /// A form with the names of this option; `None` for an empty one.
    fn form(&self, form: &str, name: &str) -> Option<String> {
        let first = self.values.as_ref().map_or("", |values| &values.all[0].0);
        let form = form.replace("$n", name).replace("$v", &self.values_name());
        let form = form.replace("$i", &self.integer).replace("$1", first);
        Some(form.replace("$t", &camel(&self.name))).filter(|form| !form.is_empty())
    }

    /// Name of the builder's method.
    fn setter(&self) -> &str {
        self.set.as_deref().unwrap_or(&self.name)
    }

    /// Default in words, unless it is that there is none.
    fn default_in_words(&self) -> Option<&str> {
        self.default.as_deref().filter(|default| *default != "none")
    }

    /// Meaning in one language, with the version that has added the option.
    fn meaning(&self, own: Option<&String>) -> String {
        let default = self.default.as_deref().unwrap_or("");
        let mut text = own.unwrap_or(&self.meaning).replace("{default}", default);
        if let Some(since) = &self.since {
            text += &format!(" Since {since}.");
        }
        text
    }

    /// Name of the list of the values of a choice.
    fn values_name(&self) -> String {
        format!("{}S", self.name.to_uppercase())
    }

    /// Values of a choice as (text, variant of the enum), for `match`-like lists.
    fn variants(&self) -> impl Iterator<Item = (&str, String)> {
        let values = self.values.as_ref().filter(|values| values.name.is_some());
        values.into_iter().flat_map(|values| {
            let variant =
                |name: &str| format!("{}::{}", values.name.as_deref().unwrap_or(""), camel(name));
            values.all.iter().map(move |(name, _)| (name.as_str(), variant(name)))
        })
    }
}

/// Writes the files; with `check` compares them instead.
///
/// # Errors
/// A text that names a file that cannot be read or, with `check`, that differs.
pub(crate) fn run(check: bool) -> Result<(), String> {
    let root = root();
    let read = |path: &Path| {
        fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))
    };
    let table: OptionTable = toml::from_str(&read(&root.join("options.toml"))?)
        .map_err(|error| format!("options.toml: {error}"))?;
    for (name, write) in TARGETS {
        let path = root.join(name);
        let present = if path.exists() { read(&path)? } else { String::new() };
        let written = write(&table.option, &present);
        if check && written != present {
            return Err(format!("{name} is not that of options.toml: run `cargo xtask options`"));
        }
        if written != present {
            fs::write(&path, written).map_err(|error| format!("{name}: {error}"))?;
        }
    }
    Ok(())
}

/// Replaces the lines of a region. `lines` gets the text before it.
fn region(text: &str, name: &str, lines: impl FnOnce(&str) -> String) -> String {
    let start = text.find(&format!("options.toml: {name}\n")).expect("a region of the file");
    let start = start + text[start..].find('\n').map_or(0, |end| end + 1);
    let end = start + text[start..].find("options.toml: end").expect("an end of the region");
    let end = text[..end].rfind('\n').map_or(0, |line| line + 1);
    format!("{}{}{}", &text[..start], lines(&text[..start]), &text[end..])
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
    lines + &line + "\n"
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

/// Setters that a group calls with `value`, after `before`.
fn setters(
    options: &[AttentionOption],
    group: OptionGroup,
    before: &str,
    value: impl Fn(&AttentionOption) -> Option<String>,
    after: &str,
) -> Option<String> {
    let of_group = options.iter().filter(|option| option.group == group);
    let call = |option: &AttentionOption| {
        value(option).map(|value| format!(".{}({value})", option.setter()))
    };
    let calls: Vec<String> = of_group.filter_map(call).collect();
    let line = format!("{before}{}{after}", calls.concat());
    if line.len() <= 100 {
        return (!calls.is_empty()).then_some(line);
    }
    let indent = " ".repeat(before.len() - before.trim_start().len() + 4);
    Some(format!("{before}\n{indent}{}{after}", calls.join(&format!("\n{indent}"))))
}

/// A constant array.
fn array(name: &str, kind: &str, items: &[String]) -> String {
    let declared = format!("const {name}: [{kind}; {}] =", items.len());
    let line = format!("{declared} [{}];\n", items.join(", "));
    let long = || format!("{declared} [\n    {},\n];\n", items.join(",\n    "));
    if line.len() <= 101 { line } else { long() }
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_language_has_the_options_of_the_table() {
        super::run(true).unwrap_or_else(|error| panic!("{error}"));
    }
}
