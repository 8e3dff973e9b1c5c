//! Command lines without a meaning, each as one line that names the flag at fault.
//!
//! clap's own messages quote values in full and raw, spread over several lines, and name no flag
//! where a value is not UTF-8 or begins with a hyphen. The line here has the form of every other
//! message, `--flag: got VALUE, want WHAT`, and a bounded length.

use std::ffi::OsString;

use clap::{
    Arg, Command,
    builder::ValueParser,
    error::{ContextKind, ContextValue, Error, ErrorKind},
};

use crate::{
    failure::Failure,
    message::{self, one_line},
};

/// Bytes of a quoted value: enough to recognise it, about a line of a terminal.
const MOST_QUOTED_BYTES: usize = 100;
/// Bytes of clap's own text: a message of several lines that quotes nothing of a user's is shorter.
const MOST_TEXT_BYTES: usize = 800;

/// Returns the command tree in which every flag with a value also takes one that is a negative
/// number, so that the flag's own parser judges it.
pub(crate) fn with_negative_numbers(command: Command) -> Command {
    command
        .mut_args(|argument| {
            let takes_value = argument.get_action().takes_values();
            if takes_value { argument.allow_negative_numbers(true) } else { argument }
        })
        .mut_subcommands(with_negative_numbers)
}

/// Returns the line for a command line that clap has refused, and the subcommand whose help has more.
pub(crate) fn of(error: &Error, root: &Command, arguments: &[OsString]) -> Failure {
    let (command, path) = subcommand(root, arguments);
    let what = what(error, command, arguments);
    Failure::Usage(format!("{what}; try `{path} --help`"))
}

/// Returns a value of a user's as it may stand in a message: printable and short.
fn quoted(value: &str) -> String {
    if value.is_empty() { "nothing".to_owned() } else { message::fitted(value, MOST_QUOTED_BYTES) }
}

/// The innermost subcommand of a command line, and its name in full.
fn subcommand<'a>(root: &'a Command, arguments: &[OsString]) -> (&'a Command, String) {
    let (mut command, mut path) = (root, root.get_name().to_owned());
    for argument in arguments.iter().skip(1) {
        match command.find_subcommand(argument) {
            Some(found) => {
                command = found;
                path = format!("{path} {}", found.get_name());
            }
            // a flag may precede a subcommand
            None if argument.as_encoded_bytes().starts_with(b"-") => {}
            None => break,
        }
    }
    (command, path)
}

fn what(error: &Error, command: &Command, arguments: &[OsString]) -> String {
    let text_of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let argument = text_of(ContextKind::InvalidArg).unwrap_or_default();
    // `--ranks <N>`
    let flag = argument.split(' ').next().unwrap_or_default().trim_end_matches("...");
    match error.kind() {
        ErrorKind::InvalidValue | ErrorKind::ValueValidation if !flag.is_empty() => {
            let want = match error.get(ContextKind::ValidValue) {
                Some(ContextValue::Strings(values)) if !values.is_empty() => {
                    format!("want {}", alternatives(values))
                }
                _ => std::error::Error::source(error)
                    .map_or_else(|| "want a value".to_owned(), ToString::to_string),
            };
            let got = text_of(ContextKind::InvalidValue).unwrap_or_default();
            format!("{flag}: got {}, {}", quoted(got), one_line(&want))
        }
        ErrorKind::InvalidUtf8 => not_utf8(command, arguments),
        ErrorKind::UnknownArgument => {
            hyphen_value(argument, command, arguments).unwrap_or_else(|| {
                if argument.len() > MOST_QUOTED_BYTES {
                    format!("unexpected argument {}", quoted(argument))
                } else {
                    text(error)
                }
            })
        }
        ErrorKind::InvalidSubcommand => {
            let name = text_of(ContextKind::InvalidSubcommand).unwrap_or_default();
            format!("unrecognized subcommand {}", quoted(name))
        }
        _ => text(error),
    }
}

/// clap's text without usage and tips on help, which follow it.
fn text(error: &Error) -> String {
    let text = error.to_string();
    let what = text
        .split("\n\nUsage:")
        .next()
        .and_then(|text| text.split("\n\nFor more information").next())
        .unwrap_or(&text);
    message::line_of(what.strip_prefix("error: ").unwrap_or(what), MOST_TEXT_BYTES)
}

/// `a, b or c`.
fn alternatives(values: &[String]) -> String {
    match values {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => values.concat(),
    }
}

/// A value that begins with a hyphen is taken for a flag: the flag before it is named.
fn hyphen_value(unknown: &str, command: &Command, arguments: &[OsString]) -> Option<String> {
    let at = arguments
        .iter()
        .position(|argument| argument.to_str().is_some_and(|text| text.starts_with(unknown)))?;
    let before = arguments.get(at.checked_sub(1)?)?.to_str()?;
    let flag = flag_named(command, before)?;
    let value = arguments[at].to_string_lossy();
    flag.get_action().takes_values().then(|| {
        format!("{before}: got {}, want a value that begins with no hyphen", quoted(&value))
    })
}

/// Names the first argument that is not UTF-8, paths apart, which may be any bytes.
fn not_utf8(command: &Command, arguments: &[OsString]) -> String {
    let name = |at: usize| {
        let bytes = arguments[at].as_encoded_bytes();
        if let Some(end) =
            bytes.starts_with(b"--").then(|| bytes.iter().position(|&byte| byte == b'=')).flatten()
        {
            return std::str::from_utf8(&bytes[..end]).ok();
        }
        at.checked_sub(1)
            .and_then(|before| arguments[before].to_str())
            .filter(|text| text.starts_with("--"))
    };
    let is_path = |name: &str| {
        flag_named(command, name).is_some_and(|flag| {
            flag.get_value_parser().type_id() == ValueParser::path_buf().type_id()
        })
    };
    let wrong = (1..arguments.len()).filter(|&at| arguments[at].to_str().is_none());
    let at = wrong
        .clone()
        .find(|&at| name(at).is_none_or(|name| !is_path(name)))
        .or_else(|| wrong.clone().next());
    let Some(at) = at else { return "a command line in UTF-8 is wanted".to_owned() };
    let written = arguments[at].to_string_lossy();
    // of `--flag=value` only the value is at fault
    let value = written
        .split_once('=')
        .filter(|(flag, _)| name(at) == Some(flag))
        .map_or(&*written, |(_, value)| value);
    let got = quoted(value);
    match name(at) {
        Some(flag) => format!("{}: got {got}, want UTF-8", quoted(flag)),
        None => format!("argument {at}: got {got}, want UTF-8"),
    }
}

/// The flag that is written so on the command line.
fn flag_named<'a>(command: &'a Command, written: &str) -> Option<&'a Arg> {
    let name = written.strip_prefix("--")?;
    let is_alias =
        |flag: &Arg| flag.get_all_aliases().is_some_and(|aliases| aliases.contains(&name));
    command.get_arguments().find(|flag| flag.get_long() == Some(name) || is_alias(flag))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree() -> Command {
        let number = |text: &str| text.parse::<u32>().map_err(|_| "want a whole number");
        let count = Arg::new("count").long("count").value_name("N").value_parser(number);
        let file =
            Arg::new("file").long("file").value_parser(clap::value_parser!(std::path::PathBuf));
        let form = Arg::new("form").long("form").value_parser(["round", "square", "flat"]);
        let inner = Command::new("inner").args([count, file, form]);
        with_negative_numbers(
            Command::new("outer").subcommand(Command::new("middle").subcommand(inner)),
        )
    }

    fn refused(arguments: &[&[u8]]) -> String {
        use std::os::unix::ffi::OsStringExt;
        let all = [&b"outer"[..], b"middle", b"inner"];
        let arguments: Vec<OsString> =
            all.iter().chain(arguments).map(|bytes| OsString::from_vec(bytes.to_vec())).collect();
        let mut tree = tree();
        let error = tree.try_get_matches_from_mut(&arguments).unwrap_err();
        of(&error, &tree, &arguments).text()
    }

    #[test]
    fn the_flag_and_the_subcommand_are_named_whatever_the_value_is() {
        let cases: [(&[&[u8]], &str); 8] = [
            (&[b"--count", b"x"], "--count: got x, want a whole number"),
            (&[b"--count", b"-1"], "--count: got -1, want a whole number"),
            (&[b"--count", b"-inf"], "--count: got -inf, want a value that begins with no hyphen"),
            (&[b"--count", b""], "--count: got nothing, want a whole number"),
            (&[b"--count", b"\x1b[2J\n"], "--count: got \\u{1b}[2J\\n, want a whole number"),
            (&[b"--file", b"\xff", b"--count", b"\xff"], "--count: got \u{fffd}, want UTF-8"),
            (&[b"--count=\xff"], "--count: got \u{fffd}, want UTF-8"),
            (&[b"--form", b"long"], "--form: got long, want round, square or flat"),
        ];
        for (arguments, want) in cases {
            assert_eq!(refused(arguments), format!("{want}; try `outer middle inner --help`"));
        }
        assert!(refused(&[b"--count"]).starts_with("--count: got nothing, want a value;"));
    }

    #[test]
    fn a_value_of_any_length_is_quoted_in_part() {
        let long = "y".repeat(100_000);
        for arguments in [
            &[&b"--count"[..], long.as_bytes()][..],
            &[long.as_bytes()],
            &[format!("--{long}").as_bytes()],
        ] {
            let said = refused(arguments);
            assert!(said.len() < 300 && said.contains("yyy") && said.contains('…'), "{said}");
        }
    }
}
