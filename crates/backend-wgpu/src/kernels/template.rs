//! Minimal WGSL template: conditional lines and names.

use std::collections::HashMap;

/// Flags and names of one template.
#[derive(Debug, Default)]
pub(super) struct Template {
    flags: HashMap<&'static str, bool>,
    names: HashMap<&'static str, String>,
}

/// Depth to which texts of names may contain names. The templates need 2; without a bound a name in
/// its own text would not end.
const MAX_NESTING: usize = 4;

/// Appends a text to `into` with its names replaced, and those in their texts, to a depth of
/// `nesting`. Names without a text stay.
fn replace_names<'a>(
    text: &str,
    text_of: &impl Fn(&str) -> Option<&'a str>,
    nesting: usize,
    into: &mut String,
) {
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("{{") {
        into.push_str(before);
        let end = after.find(|letter: char| !(letter.is_ascii_alphanumeric() || letter == '_'));
        let (name, next) = after.split_at(end.unwrap_or(after.len()));
        match (text_of(name), next.strip_prefix("}}")) {
            (Some(text), Some(next)) => {
                if nesting > 1 {
                    replace_names(text, text_of, nesting - 1, into);
                } else {
                    into.push_str(text);
                }
                rest = next;
            }
            _ => {
                into.push_str("{{");
                rest = after;
            }
        }
    }
    into.push_str(rest);
}

impl Template {
    /// Sets the condition of `#if name`.
    pub(super) fn flag(&mut self, name: &'static str, value: bool) -> &mut Self {
        self.flags.insert(name, value);
        self
    }

    /// Sets the text of a name in double braces.
    pub(super) fn name(&mut self, name: &'static str, text: impl Into<String>) -> &mut Self {
        self.names.insert(name, text.into());
        self
    }

    /// Expands a template. Texts of names may contain names and conditions. An unset flag is false;
    /// an unset name is left in the text, where it fails to compile.
    pub(super) fn expand(&self, text: &str) -> String {
        let mut named = String::with_capacity(2 * text.len());
        let text_of = |name: &str| self.names.get(name).map(String::as_str);
        replace_names(text, &text_of, MAX_NESTING, &mut named);
        let mut expanded = String::with_capacity(named.len());
        // one element per enclosing condition
        let mut wanted = Vec::new();
        for line in named.lines() {
            let directive = line.trim();
            if let Some(condition) = directive.strip_prefix("#if ") {
                let (name, negated) =
                    condition.strip_prefix('!').map_or((condition, false), |name| (name, true));
                wanted.push(self.flags.get(name).copied().unwrap_or(false) != negated);
            } else if directive == "#else" {
                if let Some(last) = wanted.last_mut() {
                    *last = !*last;
                }
            } else if directive == "#end" {
                wanted.pop();
            } else if wanted.iter().all(|&wanted| wanted) {
                expanded.push_str(line);
                expanded.push('\n');
            }
        }
        expanded
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_nest_and_names_are_replaced() {
        let mut template = Template::default();
        template.flag("A", true).flag("B", false).name("X", "one {{Y}}").name("Y", "two");
        let text =
            "#if A\n{{X}}\n#if B\nno\n#else\nyes\n#end\n#else\nnever\n#end\n#if !C\nlast\n#end\n";
        assert_eq!(template.expand(text), "one two\nyes\nlast\n");
    }

    #[test]
    fn names_without_a_text_stay_and_a_name_in_its_own_text_ends() {
        let mut template = Template::default();
        template.name("X", "x").name("LOOP", "l{{LOOP}}");
        assert_eq!(template.expand("{{X}}{{UNSET}}{{{X}}}\n"), "x{{UNSET}}{{{X}}}\n");
        assert_eq!(template.expand("{{LOOP}}\n"), "llll{{LOOP}}\n");
    }
}
