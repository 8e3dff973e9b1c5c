//! C and Fortran: the struct of options, its constants and setters; and the page of all languages.

use super::{
    AttentionOption, GROUPS, OptionGroup, OptionKind, WRITTEN, array, ascii, region, setters,
    uncapitalized, wrapped,
};

impl AttentionOption {
    fn field(&self) -> Option<&str> {
        self.c.as_ref().map(|field| field.name.as_deref().unwrap_or(&self.name))
    }

    /// Type of the field in Rust.
    fn field_type(&self) -> &str {
        let given = self.c.as_ref().and_then(|field| field.kind.as_deref());
        given.unwrap_or(self.kind.forms().c[0])
    }

    /// Default of the field, if it is not 0.
    fn field_default(&self) -> Option<&str> {
        let given = self.c.as_ref().and_then(|field| field.zero.as_deref());
        given.or((self.kind == OptionKind::Optional).then_some("ANNULUS_NONE"))
    }

    /// Names of the constants of the values.
    fn constants(&self) -> Vec<String> {
        let values = self.values.iter();
        let constant = |prefix: &str, name: &str| {
            format!("ANNULUS_{}_{}", prefix.to_uppercase(), name.to_uppercase())
        };
        values
            .flat_map(|values| values.all.iter().map(|(name, _)| constant(&values.prefix, name)))
            .collect()
    }

    /// Values in words: `ANNULUS_X_A (default), B or C`.
    fn values_in_words(&self) -> Option<String> {
        let values = self.values.as_ref()?;
        let names: Vec<String> = values.all.iter().map(|(name, _)| name.to_uppercase()).collect();
        let (last, others) = names[1..].split_last()?;
        let others: String = others.iter().map(|name| format!(", {name}")).collect();
        Some(format!("{} (default){others} or {last}", self.constants()[0]))
    }

    fn field_meaning(&self) -> String {
        let own = self.c.as_ref().and_then(|field| field.meaning.as_ref());
        let mut text = self.meaning(own);
        if let Some(values) = self.values_in_words() {
            let (first, rest) = text.split_once(". ").unwrap_or((text.trim_end_matches('.'), ""));
            return ascii(format!("{first}: {values}. {rest}").trim_end());
        }
        if own.is_some() || text.contains("Default:") || text.contains("(default)") {
            return ascii(&text);
        }
        if self.kind == OptionKind::Flag {
            text = format!("Flag: {}", uncapitalized(&text));
        }
        let default = self.default_in_words();
        match (self.kind, default) {
            (OptionKind::Flag | OptionKind::Count, _) => text.push_str(" Default: 0."),
            (OptionKind::Optional, Some(default)) => {
                text += &format!(" Default: ANNULUS_NONE, {default}.");
            }
            (OptionKind::Other, Some(default)) => {
                text += &format!(" Default: {default}.");
            }
            (_, Some(default)) => {
                text += &format!(" Default: 0, which is {default}.");
            }
            (_, None) => {}
        }
        ascii(&text)
    }

    /// Value of the setter, read from `options`.
    fn read(&self) -> Option<String> {
        let name = self.field()?;
        self.form(self.kind.forms().c[1], name)
    }
}

/// `crates/capi/src/option_fields.rs`.
pub(super) fn rust(options: &[AttentionOption]) -> String {
    let mut text =
        format!("//! The options of C, and the setters of the simple ones.\n//! {WRITTEN}\n");
    let enums: Vec<&str> = options
        .iter()
        .filter(|option| option.kind == OptionKind::Choice)
        .filter_map(|option| option.values.as_ref()?.name.as_deref())
        .collect();
    let mut used: Vec<&str> =
        enums.into_iter().chain(["Attention", "Division", "Result", "Runtime"]).collect();
    used.sort_unstable();
    text += &format!(
        "\nuse annulus::{{{}}};\n
use crate::{{
    fields::{{ANNULUS_NONE, count, flag, number, one_of, optional, positive, seconds}},
    tensor::ANNULUS_F32,
    versioned::Versioned,
}};\n",
        used.join(", ")
    );
    for option in options {
        let meanings = option.values.iter().flat_map(|values| &values.all);
        for (number, (name, (_, meaning))) in option.constants().iter().zip(meanings).enumerate() {
            if number == 0 {
                text.push('\n');
            }
            text += &wrapped(&ascii(meaning), "/// ", "/// ");
            text += &format!("pub const {name}: i32 = {number};\n");
        }
    }
    for option in options.iter().filter(|option| option.kind == OptionKind::Choice) {
        let all: Vec<String> = option.variants().map(|(_, variant)| variant).collect();
        let kind = all[0].split(':').next().unwrap_or("");
        text += &format!("\n/// Values of `{}`.\n", option.name);
        text += &array(&option.values_name(), kind, &all);
    }
    text += "
/// The definition of one attention. [`annulus_options_init`](crate::annulus_options_init) sets the
/// defaults; the caller then sets the seven lengths and what differs.
///
/// A pair of query and key is visible if every condition that is given holds; i' and j' are their
/// positions. docs/semantics.md defines every parameter. Flags are 0 or 1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_options {
    /// sizeof(annulus_options).
    pub struct_size: u64,
";
    for option in options {
        let Some(name) = option.field() else { continue };
        text += &wrapped(&option.field_meaning(), "    /// ", "    /// ");
        text += &format!("    pub {name}: {},\n", option.field_type());
    }
    text += "}

// SAFETY: repr(C), begins with its size, and all fields are numbers, which may be 0
unsafe impl Versioned for annulus_options {
    const NAME: &'static str = \"options\";
    const FIRST_BYTES: usize = 248;
}

// fields are appended, never removed
const _: () = assert!(size_of::<annulus_options>() >= annulus_options::FIRST_BYTES);

impl annulus_options {
    pub(crate) fn defaults() -> Self {
        // SAFETY: numbers may be 0
        let zeros: Self = unsafe { std::mem::zeroed() };
        Self {
            struct_size: size_of::<Self>() as u64,
";
    for option in options {
        if let (Some(name), Some(default)) = (option.field(), option.field_default()) {
            text += &format!("            {name}: {default},\n");
        }
    }
    text += "            ..zeros\n        }\n    }\n}\n";
    for (group, name, builder) in GROUPS {
        let body = setters(options, group, "    Ok(builder", AttentionOption::read, ")");
        text += &format!(
            "
/// Sets the options of {name} whose form is that of all languages.
pub(crate) fn set_{name}(builder: {builder}, options: &annulus_options) -> Result<{builder}> {{
{}\n}}\n",
            body.unwrap_or("    Ok(builder)".to_owned())
        );
    }
    text
}

/// `annulus.f90`: the constants of values, and the derived type.
pub(super) fn fortran(options: &[AttentionOption], text: &str) -> String {
    let constants = options.iter().flat_map(|option| {
        option.constants().into_iter().enumerate().map(|(number, name)| {
            format!("  integer(c_int32_t), parameter, public :: {name} = {number}\n")
        })
    });
    let fields = options.iter().filter_map(|option| {
        let (declared, zero) = match option.field_type() {
            "f64" => ("real(c_double)", "0.0_c_double"),
            "i32" => ("integer(c_int32_t)", "0"),
            _ => ("integer(c_int64_t)", "0"),
        };
        let extent = if option.field_type().starts_with('[') { "(4)" } else { "" };
        Some(format!("    {declared} :: {}{extent} = {zero}\n", option.field()?))
    });
    let text = region(text, "constants", |_| constants.collect());
    region(&text, "fields", |_| fields.collect())
}

/// The table of `docs/semantics.md`.
pub(super) fn page(options: &[AttentionOption], text: &str) -> String {
    let mut table = "\n| option | C, C++, Fortran | Python | command | default |\n".to_owned();
    table += "|---|---|---|---|---|\n";
    let named = |name: Option<String>| name.map_or(String::new(), |name| format!("`{name}`"));
    let described = options.iter().filter(|option| option.group != OptionGroup::Shape);
    for option in described.filter(|option| option.python.is_some() || option.command.is_some()) {
        let is_number = matches!(option.kind, OptionKind::Count);
        let default = match (&option.default, option.kind) {
            (Some(default), _) => default.as_str(),
            (None, OptionKind::Flag) => "false",
            (None, _) if is_number => "0",
            (None, _) => option.values.as_ref().map_or("", |values| &values.all[0].0),
        };
        let python = option.python.as_ref().filter(|parameter| parameter.is_declared());
        let python = python.map(|parameter| option.parameter(parameter).to_owned());
        let command = option.command.as_ref().map(|flag| format!("--{}", option.flag(flag)));
        table += &format!(
            "| `{}` | {} | {} | {} | {} |\n",
            option.setter(),
            named(option.field().map(str::to_owned)),
            named(python),
            named(command),
            default.replace("``", "`"),
        );
    }
    region(text, "table -->", |_| table + "\n")
}
