//! Text from outside (names in files, paths, flag values, the system's own words) before it is
//! printed.
//!
//! Everything that the command prints passes through this file: no control character of such a text
//! reaches the terminal, and no message on standard error is longer than a screen. A long name
//! keeps its beginning and its end; its length stands in the middle.

use std::{fmt, io, path::Path};

/// The most bytes of one message, `annulus: ` and the newline included: a screen of 24 lines of 80
/// columns.
pub(crate) const MOST_MESSAGE_BYTES: usize = 24 * 80;
/// Bytes of `annulus: `, of the newline, and of a `rank N: ` before the text.
const FRAME_BYTES: usize = 40;
/// The most bytes of a name: several of them fit one message.
const MOST_NAME_BYTES: usize = 160;
/// The most bytes of a path: two names of the longest kind that file systems have, and some
/// folders.
const MOST_PATH_BYTES: usize = 640;
/// The most names of a list.
const MOST_LISTED: usize = 8;

/// A message as one line of at most a screen: runs of white space become one space, other control
/// characters their escapes.
pub(crate) fn one_line(text: &str) -> String {
    line_of(text, MOST_MESSAGE_BYTES - FRAME_BYTES)
}

/// As [`one_line`], in at most `most` bytes.
pub(crate) fn line_of(text: &str, most: usize) -> String {
    let words: Vec<&str> = text.split_whitespace().collect();
    fitted(&words.join(" "), most)
}

/// A name from outside: control characters as their escapes, the middle of a long one left out.
pub(crate) fn name(name: &str) -> String {
    // nothing would be read as a mistake of this program
    if name.is_empty() { "\"\"".to_owned() } else { fitted(name, MOST_NAME_BYTES) }
}

/// A path, as [`name`].
pub(crate) fn path(path: &Path) -> String {
    fitted(&path.to_string_lossy(), MOST_PATH_BYTES)
}

/// The first few of some names, and the number of the others.
pub(crate) fn list<'a>(names: impl IntoIterator<Item = &'a str>) -> String {
    let mut names = names.into_iter();
    let shown: Vec<String> = names.by_ref().take(MOST_LISTED).map(name).collect();
    match names.count() {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// `text` without control characters in at most `most` bytes; what is left out of the middle is
/// replaced by the length of the whole.
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
        let (mut taken, mut bytes) = (Vec::new(), 0);
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
    // the end of a message often has what would have been right
    let head = take(&mut text.chars(), room / 2).concat();
    let mut tail = take(&mut text.chars().rev(), room - room / 2);
    tail.reverse();
    head + &mark + &tail.concat()
}

/// Appends a letter, or the escape of one that a terminal acts on or does not show.
fn push(text: &mut String, letter: char) {
    if is_hidden(letter) { text.extend(letter.escape_default()) } else { text.push(letter) }
}

/// True of control characters, and of those that change the direction of text or cannot be seen.
const fn is_hidden(letter: char) -> bool {
    matches!(letter,
        '\0'..='\u{1f}' | '\u{7f}'..='\u{9f}' | '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
        | '\u{2060}'..='\u{206f}' | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{e0000}'..='\u{e007f}')
}

/// Describes an error of a JSON text, after the path of the value at fault.
pub(crate) fn of_json(error: &serde_path_to_error::Error<serde_json::Error>) -> String {
    let path = error.path().to_string();
    // a lone dot is the whole text
    if path == "." {
        error.inner().to_string()
    } else {
        format!("{}: {}", name(&path), error.inner())
    }
}

/// Writes `text` with its line breaks, and every other control character as its escape.
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
    fn whatever_is_quoted_stays_one_line() {
        assert_eq!(one_line("a\n\n  b\tc\u{1b}[0m"), r"a b c\u{1b}[0m");
        assert_eq!(
            name("evil\n\u{1b}[2J\r\u{7}\0\u{9b}\u{202e}x"),
            r"evil\n\u{1b}[2J\r\u{7}\u{0}\u{9b}\u{202e}x"
        );
        assert_eq!(name("größe"), "größe");
        assert_eq!(name(""), "\"\"");
    }

    #[test]
    fn long_texts_keep_both_ends_and_say_their_length() {
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
    fn a_list_says_how_many_it_leaves_out() {
        assert_eq!(list(["a", "b"]), "a, b");
        let many: Vec<String> = (0..1_500_000).map(|number| number.to_string()).collect();
        assert_eq!(
            list(many.iter().map(String::as_str)),
            "0, 1, 2, 3, 4, 5, 6, 7 and 1499992 more"
        );
    }

    #[test]
    fn lines_of_the_program_keep_their_breaks_and_lose_their_escapes() {
        let mut out = Vec::new();
        write_visible(&mut out, format_args!("{{\n  {}\n}}", "a\u{1b}[2J\r")).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), "{\n  a\\u{1b}[2J\\r\n}");
    }
}
