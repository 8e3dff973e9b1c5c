//! Variables of the environment that a plan reads.

use std::{env, ffi::OsStr, time::Duration};

use annulus_core::{Error, Result};

use crate::comm::deadline;

/// Name of the variable that replaces the deadline of plans, and the arrival deadline of those that
/// have one: seconds, or 0 for none, for example while a debugger stops ranks. It is read when a
/// plan is made, and must be the same on all ranks.
pub const DEADLINE: &str = "ANNULUS_DEADLINE";

/// Longest deadline in seconds, as of the command's `--deadline`: 11 days.
const LONGEST: f64 = 1e6;

/// Returns the deadline that [`DEADLINE`] sets, 0 for none; `None` if it is not set.
///
/// # Errors
/// [`Error::InvalidArgument`] if its value is no number of seconds from 1 to 10⁶, and not 0.
pub fn deadline() -> Result<Option<Duration>> {
    env::var_os(DEADLINE).map(|value| parse(&value)).transpose()
}

fn parse(value: &OsStr) -> Result<Duration> {
    let least = deadline::LEAST.as_secs_f64();
    let seconds = value.to_str().and_then(|text| text.trim().parse::<f64>().ok());
    match seconds {
        Some(seconds) if seconds == 0.0 || (least..=LONGEST).contains(&seconds) => {
            Ok(Duration::from_secs_f64(seconds))
        }
        _ => {
            let want = format!("0 for no deadline, or {least} to {LONGEST} seconds");
            Err(Error::invalid(DEADLINE, value.to_string_lossy(), want))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seconds_are_read_and_anything_else_is_an_error() {
        let read = |text: &str| parse(OsStr::new(text));
        assert_eq!(read("0"), Ok(Duration::ZERO));
        assert_eq!(read(" 1.5 "), Ok(Duration::from_millis(1500)));
        assert_eq!(read("1000000"), Ok(Duration::from_secs(1_000_000)));
        for wrong in ["", "none", "0.5", "-1", "1e7", "NaN", "inf", "10s"] {
            let error = read(wrong).unwrap_err();
            assert!(error.to_string().starts_with("ANNULUS_DEADLINE: got"), "{error}");
        }
    }
}
