//! Edits of the kernels' text, with a choice at run time between the edited text and the original.

use std::{collections::BTreeMap, ops::Range};

use annulus_core::{Error, Result};

use super::Mistake;

/// A change of one place of a kernel file.
pub(crate) struct Edit {
    pub(super) file: &'static str,
    /// Text that occurs once in the file. What is between « and » is replaced; without them all of
    /// it. It is one or more statements, or an expression.
    pub(super) from: &'static str,
    /// Text in its place.
    pub(super) to: &'static str,
}

impl Edit {
    /// Returns the range of the replaced text in that of the file.
    fn range(&self, text: &str) -> Result<Range<usize>> {
        let context = self.from.replace(['«', '»'], "");
        let found: Vec<usize> = text.match_indices(&context).map(|(at, _)| at).collect();
        let [at] = found[..] else {
            let want = format!("a text that occurs once in the file, not {} times", found.len());
            return Err(Error::invalid("edit", format!("{}: {context}", self.file), want));
        };
        let begin = self.from.find('«').unwrap_or(0);
        let marked = self.from.find('»').map_or(context.len(), |end| end - '«'.len_utf8());
        Ok(at + begin..at + marked)
    }
}

/// A place that is edited, by one mistake or several.
struct Place<'a> {
    range: Range<usize>,
    choices: Vec<Choice<'a>>,
}

/// The text of a mistake in a place.
struct Choice<'a> {
    number: u32,
    to: &'a str,
}

/// Returns the text of `file` with all mistakes, numbered from 1, each if `planted(N)`.
///
/// # Errors
/// [`Error::InvalidArgument`] naming file and text if a text to edit does not occur exactly once,
/// or if two edits overlap.
pub(super) fn apply<'a>(
    mistakes: impl Iterator<Item = &'a Mistake>,
    file: &str,
    text: &str,
) -> Result<String> {
    let mut places: BTreeMap<usize, Place<'a>> = BTreeMap::new();
    for (number, mistake) in (1..).zip(mistakes) {
        for edit in mistake.edits.iter().filter(|edit| edit.file == file) {
            let range = edit.range(text)?;
            let new = || Place { range: range.clone(), choices: Vec::new() };
            let place = places.entry(range.start).or_insert_with(new);
            if place.range != range {
                return Err(overlap(file, edit.from));
            }
            place.choices.push(Choice { number, to: edit.to });
        }
    }
    let mut edited = String::new();
    let mut end = 0;
    for Place { range, choices } in places.into_values() {
        let original = &text[range.clone()];
        let before = text.get(end..range.start).ok_or_else(|| overlap(file, original))?;
        edited += before;
        edited += &chosen(original, &choices);
        end = range.end;
    }
    Ok(edited + &text[end..])
}

fn overlap(file: &str, text: &str) -> Error {
    Error::invalid("edit", format!("{file}: {text}"), "a text that overlaps with no other edit")
}

/// Statements or an expression that are one of the `choices` if it is planted, else the `original`.
fn chosen(original: &str, choices: &[Choice<'_>]) -> String {
    if original.ends_with([';', '}']) {
        let statements =
            |Choice { number, to }: &Choice<'_>| format!("if (planted({number})) {{ {to} }} else ");
        let choices: String = choices.iter().map(statements).collect();
        // braces: an `else` that follows belongs to an `if` before
        format!("{{ {choices}{{ {original} }} }}")
    } else {
        let expression =
            |Choice { number, to }: &Choice<'_>| format!("planted({number}) ? ({to}) : ");
        let choices: String = choices.iter().map(expression).collect();
        format!("({choices}({original}))")
    }
}
