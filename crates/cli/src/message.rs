//! Escapes and truncates external text (names in files, paths, flag values, errors of the system)
//! before it is printed.
//!
//! All output of the command passes through this file. Control characters are escaped, and no
//! message on standard error is longer than a screen. A long text keeps its beginning and its end,
//! with its length between them.

use std::{fmt, io, path::Path};

/// The most bytes of one message, `annulus: ` and the newline included: a screen of 24 lines of 80
/// columns.
pub(crate) const MOST_MESSAGE_BYTES: usize = 24 * 80;
/// Bytes of `annulus: `, of the newline, and of a `rank N: ` before the text.
const FRAME_BYTES: usize = 40;
/// The most bytes of a name: a list of [`MOST_LISTED`] names fits one message.
const MOST_NAME_BYTES: usize = 160;
/// The most bytes of a path: two names of the maximum length of file systems, 255, and some
/// folders.
const MOST_PATH_BYTES: usize = 640;
/// The most names of a list.
const MOST_LISTED: usize = 8;

/// Formats a message as one line of at most a screen: white space becomes single spaces, and other
/// control characters are escaped.
pub(crate) fn one_line(text: &str) -> String {
    line_of(text, MOST_MESSAGE_BYTES - FRAME_BYTES)
}

/// As [`one_line`], in at most `most` bytes.
pub(crate) fn line_of(text: &str, most: usize) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    fitted(&words.join(" "), most)
}

/// Formats an external name: escaped, and without its middle if it is long.
pub(crate) fn name(name: &str) -> String {
    // quotes make an empty name visible
    if name.is_empty() { "\"\"".to_owned() } else { fitted(name, MOST_NAME_BYTES) }
}

/// Formats a path as [`name`] does.
pub(crate) fn path(path: &Path) -> String {
    fitted(&path.to_string_lossy(), MOST_PATH_BYTES)
}

/// Formats the first few names and the number of the others.
pub(crate) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names = names.into_iter();
    let shown: Vec<String> = names.by_ref().take(MOST_LISTED).map(name).collect();
    match names.count() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// Formats `text` in at most `most` bytes, escaped. If it is longer, its length replaces the
/// middle.
pub(crate) fn fitted(text: &str, most: usize) -> String {
    let mut whole = String::new();
    for letter in text.chars() {
        push(&mut whole, letter);
        if whole.len() > most {
            return without_middle(text, most);
        }
    }
    whole
}

fn without_middle(text: &str, most: usize) -> String {
    let mark = format!("…({} bytes)…", text.len());
    let room = most.saturating_sub(mark.len());
    let take = |letters: &mut dyn Iterator<Item = char>, room: usize| {
        let mut taken = Vec::new();
        let mut bytes = 0;
        for letter in letters {
            let mut shown = String::new();
            push(&mut shown, letter);
            bytes += shown.len();
            if bytes > room {
                break;
            }
            taken.push(shown);
        }
        taken
    };
    // both ends are kept: errors often end with the valid values
    let head = take(&mut text.chars(), room / 2).concat();
    let mut tail = take(&mut text.chars().rev(), room - room / 2);
    tail.reverse();
    head + &mark + &tail.concat()
}

/// Appends a character, escaped if it is a control character or invisible.
fn push(text: &mut String, letter: char) {
    if is_hidden(letter) { text.extend(letter.escape_default()) } else { text.push(letter) }
}

/// True for control characters, and for characters that are invisible or change the direction of
/// text.
const fn is_hidden(letter: char) -> bool {
    matches!(letter,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{ad}' | '\u{61c}' | '\u{180e}'
        | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Formats an error of a JSON text, after the path of the invalid value.
pub(crate) fn of_json(error: &serde_path_to_error::Error<serde_json::Error>) -> String {
    let path = error.path().to_string();
    // "." is the path of the whole text, "?" that of a text which ends too early
    if path == "." || path == "?" {
        error.inner().to_string()
    } else {
        format!("{}: {}", name(&path), error.inner())
    }
}

/// Writes `text` with its line breaks and all other control characters escaped.
///
/// # Errors
/// Those of `out`.
pub(crate) fn write_visible(out: &mut impl io::Write, text: fmt::Arguments<'_>) -> io::Result<()> {
    struct Visible<'a, W> {
        out: &'a mut W,
        failed: Option<io::Error>,
    }
    impl<W: io::Write> fmt::Write for Visible<'_, W> {
        fn write_str(&mut self, text: &str) -> fmt::Result {
            let hidden = |letter: char| letter != '\n' && is_hidden(letter);
            let written = if text.contains(hidden) {
                let mut shown = String::with_capacity(text.len());
                text.chars().for_each(|letter| {
                    if letter == '\n' { shown.push(letter) } else { push(&mut shown, letter) }
                });
                self.out.write_all(shown.as_bytes())
            } else {
                self.out.write_all(text.as_bytes())
            };
            written.map_err(|error| {
                self.failed = Some(error);
                fmt::Error
            })
        }
    }
    let mut visible = Visible { out, failed: None };
    match fmt::Write::write_fmt(&mut visible, text) {
        Ok(()) => Ok(()),
        Err(fmt::Error) => Err(visible
            .failed
            .unwrap_or_else(|| io::Error::other("a value could not be formatted"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_of_json_names_its_field_if_there_is_one() {
        let parse = |text: &str| {
            let mut json = serde_json::Deserializer::from_str(text);
            let parsed: Result<std::collections::BTreeMap<String, u64>, _> =
                serde_path_to_error::deserialize(&mut json);
            of_json(&parsed.unwrap_err())
        };
        assert!(parse("{\"a\": true}").starts_with("a: invalid type"));
        assert!(parse("[]").starts_with("invalid type"));
        assert!(parse("{").starts_with("EOF while parsing"));
    }

    #[test]
    fn quoted_text_is_one_escaped_line() {
        assert_eq!(one_line("a\n\n  b\tc\u{1b}[0m"), r"a b c\u{1b}[0m");
        assert_eq!(
            name("evil\n\u{1b}[2J\r\u{7}\0\u{9b}\u{202e}x"),
            r"evil\n\u{1b}[2J\r\u{7}\u{0}\u{9b}\u{202e}x"
        );
        assert_eq!(name("größe"), "größe");
        assert_eq!(name(""), "\"\"");
    }

    #[test]
    fn long_texts_keep_both_ends_and_show_their_length() {
        for letter in ["x", "ß", "\u{1b}", "🦀"] {
            let long = format!("query{}key", letter.repeat(1 << 20));
            let shown = name(&long);
            assert!(
                shown.len() <= MOST_NAME_BYTES
                    && shown.starts_with("query")
                    && shown.ends_with("key"),
                "{shown}"
            );
            assert!(shown.contains(&format!("({} bytes)", long.len())), "{shown}");
            assert!(one_line(&long).len() <= MOST_MESSAGE_BYTES - FRAME_BYTES);
        }
        let fits = "n".repeat(MOST_NAME_BYTES);
        assert_eq!(name(&fits), fits);
        assert_eq!(path(Path::new(&"/folder".repeat(1000))).len(), MOST_PATH_BYTES);
    }

    #[test]
    fn a_list_shows_the_number_of_omitted_names() {
        assert_eq!(list(["a", "b"]), "a, b");
        let many: Vec<String> = (0..1_500_000).map(|number| number.to_string()).collect();
        assert_eq!(
            list(many.iter().map(String::as_str)),
            "0, 1, 2, 3, 4, 5, 6, 7 and 1499992 more"
        );
    }

    #[test]
    fn printed_text_keeps_line_breaks_and_is_escaped() {
        let mut out = Vec::new();
        write_visible(&mut out, format_args!("{{\n  {}\n}}", "a\u{1b}[2J\r")).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "{\n  a\\u{1b}[2J\\r\n}");
    }
}
