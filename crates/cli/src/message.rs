//! Text of files, arguments and other ranks in messages: one line, escaped, at most a screen long.

use std::path::Path;

/// The most letters of a message: a screen of 24 lines of 80 columns, without `annulus: rank N: `.
const MOST_LINE: usize = 24 * 80 - 40;
/// The most letters of a name: a list of [`MOST_LISTED`] names fits one message.
const MOST_NAME: usize = 160;
/// The most letters of a path: two names of the maximum length of file systems, 255, and some
/// folders.
const MOST_PATH: usize = 640;
/// The most names of a list.
const MOST_LISTED: usize = 8;

/// Formats a message as one line of at most a screen: white space becomes single spaces.
pub(crate) fn one_line(text: &str) -> String {
    shortened(&text.split_whitespace().collect::<Vec<_>>().join(" "), MOST_LINE)
}

/// Formats an external name.
pub(crate) fn name(name: &str) -> String {
    // quotes make an empty name visible
    if name.is_empty() { "\"\"".to_owned() } else { shortened(name, MOST_NAME) }
}

/// Formats a path.
pub(crate) fn path(path: &Path) -> String {
    shortened(&path.to_string_lossy(), MOST_PATH)
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

/// Escapes a text. If it is longer than `most`, its length replaces the middle: errors often end
/// with the valid values.
fn shortened(text: &str, most: usize) -> String {
    let shown: Vec<char> = text.chars().flat_map(|letter| escaped(letter, false)).collect();
    if shown.len() <= most {
        return String::from_iter(shown);
    }
    let mark = format!("…({} bytes)…", text.len());
    let half = most.saturating_sub(mark.len()) / 2;
    let head = &shown[..half];
    let tail = &shown[shown.len() - half..];
    head.iter().copied().chain(mark.chars()).chain(tail.iter().copied()).collect()
}

/// Escapes all control characters of a text but line breaks.
pub(crate) fn visible(text: &str) -> String {
    text.chars().flat_map(|letter| escaped(letter, true)).collect()
}

/// Escapes a control character, or one that is invisible or changes the direction of text.
fn escaped(letter: char, keep_line_breaks: bool) -> impl Iterator<Item = char> {
    let is_hidden = letter.is_control()
        || matches!(letter, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{206f}' | '\u{feff}');
    let escape = is_hidden && !(keep_line_breaks && letter == '\n');
    let whole = (!escape).then_some(letter);
    whole.into_iter().chain(escape.then(|| letter.escape_default()).into_iter().flatten())
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
    fn quoted_text_is_escaped() {
        assert_eq!(one_line("a\n\n  b\tc\u{1b}[0m"), r"a b c\u{1b}[0m");
        let evil = "evil\n\u{1b}[2J\r\u{7}\0\u{9b}\u{202e}x";
        assert_eq!(name(evil), r"evil\n\u{1b}[2J\r\u{7}\u{0}\u{9b}\u{202e}x");
        assert_eq!([name("größe"), name("")], ["größe", "\"\""]);
        assert_eq!(visible("{\n\u{1b}[2J\r}"), "{\n\\u{1b}[2J\\r}");
    }

    #[test]
    fn long_texts_keep_both_ends_and_show_their_length() {
        for letter in ["x", "ß", "\u{1b}", "🦀"] {
            let long = format!("query{}key", letter.repeat(1 << 20));
            let shown = name(&long);
            assert!(shown.chars().count() <= MOST_NAME, "{shown}");
            assert!(shown.starts_with("query") && shown.ends_with("key"), "{shown}");
            assert!(shown.contains(&format!("({} bytes)", long.len())), "{shown}");
        }
    }

    #[test]
    fn a_list_shows_the_number_of_omitted_names() {
        assert_eq!(list(["a", "b"]), "a, b");
        let many: Vec<String> = (0..1_500_000).map(|number| number.to_string()).collect();
        let all = many.iter().map(String::as_str);
        assert_eq!(list(all), "0, 1, 2, 3, 4, 5, 6, 7 and 1499992 more");
    }
}
