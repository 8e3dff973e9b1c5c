//! Names the flag in errors of the library that a flag's value has caused.

use std::path::{Path, PathBuf};

use annulus_core::{Dims, Error};
use annulus_plan::{HeadGrid, Strategy};
use clap::{ArgMatches, Command};

use super::option_flags::FLAGS;
use crate::{
    failure::{Failure, Outcome},
    message,
};

/// Lengths and the flags that set them; [`FLAGS`] has the options.
const LENGTHS: [(&str, &str); 7] = [
    ("batch", "--batch"),
    ("q_len", "--q-len"),
    ("kv_len", "--kv-len"),
    ("q_heads", "--heads"),
    ("kv_heads", "--kv-heads"),
    ("head_dim", "--head-dim"),
    ("value_dim", "--value-dim"),
];

/// Converts an error of a subcommand whose lengths come from flags. An invalid argument becomes an
/// invalid command line that names the flag. `others` has the (argument, flag) pairs of a
/// subcommand that sets some arguments by other flags.
pub(crate) fn of_flags(error: Error, others: &[(&str, &str)]) -> Failure {
    let Error::InvalidArgument { argument, got, want } = error else { return error.into() };
    let mut all = others.iter().chain(&LENGTHS).chain(FLAGS);
    let flag = all.find(|(known, _)| *known == argument).map_or(&argument[..], |(_, flag)| *flag);
    Failure::usage(flag, got, want.replace("kv_heads (", "--kv-heads ("))
}

/// Checks that `--strategy` divides the heads of `dims` among `ranks` ranks.
///
/// # Errors
/// [`Failure::Usage`] naming the flag.
pub(crate) fn check_strategy(strategy: Strategy, dims: &Dims, ranks: usize) -> Outcome {
    Ok(HeadGrid::of(dims, ranks, strategy).map(drop)?)
}

/// Returns the paths that flags of a command line name, with the names of the flags.
pub(crate) fn paths(command: &Command, matches: &ArgMatches) -> Vec<(String, PathBuf)> {
    let subcommand = matches.subcommand();
    let found = subcommand.and_then(|(name, of)| Some((command.find_subcommand(name)?, of)));
    let Some((command, matches)) = found else { return Vec::new() };
    let mut all = paths(command, matches);
    for argument in command.get_arguments() {
        let of_value = argument.get_value_names().and_then(|names| names.first());
        let name = match (argument.get_long(), of_value) {
            (Some(long), _) => format!("--{long}"),
            (None, name) => name.map(ToString::to_string).unwrap_or_default(),
        };
        let values = matches.try_get_many::<PathBuf>(argument.get_id().as_str());
        all.extend(values.into_iter().flatten().flatten().map(|path| (name.clone(), path.clone())));
    }
    all
}

/// Adds the flag to an error of a file whose path is the value of a flag, or of several flags.
pub(crate) fn of_paths(failure: Failure, flags: &[(String, PathBuf)]) -> Failure {
    let Failure::Library(Error::Io { path, what }) = failure else { return failure };
    let is_failed = |of_flag: &Path| {
        message::path(of_flag) == path
            || std::fs::canonicalize(of_flag).is_ok_and(|found| message::path(&found) == path)
    };
    let named = flags.iter().filter(|(_, of_flag)| is_failed(of_flag)).map(|(flag, _)| &flag[..]);
    let words: Vec<&str> = named.chain([path.as_str()]).collect();
    Failure::Library(Error::Io { path: words.join(" "), what })
}

/// Checks that no two flags name the same regular file: an output would replace the other file.
///
/// # Errors
/// [`Failure::Usage`] naming both flags.
pub(crate) fn check_different_files(flags: &[(&str, &Path)]) -> Outcome {
    // of a file that does not exist only the path is known
    let file = |path: &Path| std::fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
    for (index, (flag, path)) in flags.iter().enumerate() {
        // several texts may be written to one pipe or device
        let is_other = std::fs::metadata(path).is_ok_and(|found| !found.is_file());
        let same = |(_, earlier): &&(&str, &Path)| file(earlier) == file(path);
        if let Some((other, _)) = flags[..index].iter().find(same).filter(|_| !is_other) {
            return Err(Failure::usage(
                flag,
                message::path(path),
                format!("another file than {other}"),
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_of_flags_are_named_with_the_flag() {
        let error =
            |path: &str| Failure::Library(Error::Io { path: path.into(), what: "broken".into() });
        let flag = |name: &str, path: &str| (name.to_owned(), PathBuf::from(path));
        let flags = [flag("--input", "a.st"), flag("--output", "b.st")];
        assert!(of_paths(error("b.st"), &flags).text().starts_with("--output b.st: broken"));
        assert!(of_paths(error("c.st"), &flags).text().starts_with("c.st: broken"));
        let both = [flag("--input", "a.st"), flag("--machine", "a.st")];
        assert!(of_paths(error("a.st"), &both).text().starts_with("--input --machine a.st: "));
    }
}
