//! Types of the command line's values, and its errors.

pub(crate) mod mask;
pub(crate) mod names;
#[rustfmt::skip]
pub(crate) mod option_flags;
pub(crate) mod ring;
pub(crate) mod values;

/// Allows negative numbers as values of all flags, so that the flag's parser refuses them with a
/// message that names the flag.
pub(crate) fn with_negative_numbers(command: clap::Command) -> clap::Command {
    command
        .mut_args(|argument| {
            let takes_value = argument.get_action().takes_values();
            if takes_value { argument.allow_negative_numbers(true) } else { argument }
        })
        .mut_subcommands(with_negative_numbers)
}
