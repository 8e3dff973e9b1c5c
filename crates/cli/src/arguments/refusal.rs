//! Errors of the command line, each as one line that names the flag at fault.
//!
//! clap's messages have several lines, quote values without limit or escapes, and name no flag if a
//! value is not UTF-8 or begins with a hyphen. The lines here have the form of all other messages,
//! `--flag: got VALUE, want WHAT`, and a bounded length.

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

/// The most bytes of a quoted value: about one line of a terminal.
const MOST_QUOTED_BYTES: usize = 100;
/// The most bytes of clap's text: its messages without a quoted value are shorter.
const MOST_TEXT_BYTES: usize = 800;

/// Allows negative numbers as values of all flags, so that the flag's parser refuses them with a
/// message that names the flag.
pub(crate) fn with_negative_numbers(command: Command) -> Command {
    command
        .mut_args(|argument| {
            let takes_value = argument.get_action().takes_values();
            if takes_value { argument.allow_negative_numbers(true) } else { argument }
        })
        .mut_subcommands(with_negative_numbers)
}

/// Converts an error of clap into one line that also names the help of the subcommand.
pub(crate) fn of(error: &Error, root: &Command, arguments: &[OsString]) -> Failure {
    let (command, path) = subcommand(root, arguments);
    let what = what(error, command, arguments);
    Failure::Usage(format!("{what}; try `{path} --help`"))
}

/// Formats a value for a message: printable and short.
fn quoted(value: &str) -> String {
    if value.is_empty() { "nothing".to_owned() } else { message::fitted(value, MOST_QUOTED_BYTES) }
}

/// Returns the innermost subcommand of a command line, and its full name.
fn subcommand<'a>(root: &'a Command, arguments: &[OsString]) -> (&'a Command, String) {
    let mut command = root;
    let mut path = root.get_name().to_owned();
    for argument in arguments.iter().skip(1) {
        match command.find_subcommand(argument) {
            Some(found) => {
                command = found;
                path = format!("{path} {}", found.get_name());
            }
            // flags may precede the subcommand
            None if argument.as_encoded_bytes().starts_with(b"-") => {}
            None => break,
        }
    }
    (command, path)
}

/// Formats the error without the reference to the help.
fn what(error: &Error, command: &Command, arguments: &[OsString]) -> String {
    let text_of = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => Some(text.as_str()),
        _ => None,
    };
    let argument = text_of(ContextKind::InvalidArg).unwrap_or_default();
    // the flag of `--ranks <N>`
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

/// Returns clap's text without usage and help, which follow it.
fn text(error: &Error) -> String {
    let text = error.to_string();
    let what = text
        .split("\n\nUsage:")
        .next()
        .and_then(|text| text.split("\n\nFor more information").next())
        .unwrap_or(&text);
    // paragraphs, such as the tip that names a similar flag
    let line = what.strip_prefix("error: ").unwrap_or(what).replace("\n\n", "; ");
    message::line_of(&line, MOST_TEXT_BYTES)
}

/// Joins values as `a, b or c`.
fn alternatives(values: &[String]) -> String {
    match values {
        [first @ .., last] if !first.is_empty() => format!("{} or {last}", first.join(", ")),
        _ => values.concat(),
    }
}

/// Formats the error of a value that begins with a hyphen, which clap parses as an unknown flag.
/// `None` if the argument before it is not a flag with a value.
fn hyphen_value(unknown: &str, command: &Command, arguments: &[OsString]) -> Option<String> {
    let index = arguments
        .iter()
        .position(|argument| argument.to_str().is_some_and(|text| text.starts_with(unknown)))?;
    let before = arguments.get(index.checked_sub(1)?)?.to_str()?;
    let flag = flag_named(command, before)?;
    let value = arguments[index].to_string_lossy();
    flag.get_action()
        .takes_values()
        .then(|| format!("{before}: got {}, want a value without a leading hyphen", quoted(&value)))
}

/// Formats the error of the first argument that is not UTF-8. Values of path flags are skipped:
/// they may have any bytes.
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
    let Some(at) = at else { return "want a command line in UTF-8".to_owned() };
    let written = arguments[at].to_string_lossy();
    // quote only the value of `--flag=value`
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

/// Finds the flag of a command-line argument by its name or alias.
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
    fn errors_name_the_flag_and_the_subcommand() {
        let cases: [(&[&[u8]], &str); 8] = [
            (&[b"--count", b"x"], "--count: got x, want a whole number"),
            (&[b"--count", b"-1"], "--count: got -1, want a whole number"),
            (&[b"--count", b"-inf"], "--count: got -inf, want a value without a leading hyphen"),
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
        let unknown = refused(&[b"--cuont", b"1"]);
        let want =
            "unexpected argument '--cuont' found; tip: a similar argument exists: '--count';";
        assert!(unknown.starts_with(want), "{unknown}");
    }

    #[test]
    fn long_values_are_truncated() {
        let long = "y".repeat(100_000);
        for arguments in [
            &[&b"--count"[..], long.as_bytes()][..],
            &[long.as_bytes()],
            &[format!("--{long}").as_bytes()],
        ] {
            let text = refused(arguments);
            assert!(text.len() < 300 && text.contains("yyy") && text.contains('…'), "{text}");
        }
    }
}
