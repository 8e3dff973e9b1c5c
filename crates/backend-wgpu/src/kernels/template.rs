//! Minimal WGSL template: conditional lines and names.

use std::collections::HashMap;

/// Flags and names of one template.
#[derive(Debug, Default)]
pub(super) struct Template {
    flags: HashMap<&'static str, bool>,
    names: HashMap<&'static str, String>,
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
        let mut named = text.to_owned();
        // twice, because texts of names may contain names
        for _ in 0..2 {
            for (name, text) in &self.names {
                named = named.replace(&format!("{{{{{name}}}}}"), text);
            }
        }
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
}
