//! A short form of `examples/train.rs`: the checkpoint has the same bytes for one rank, for two
//! ranks, and after a stop on two ranks that one rank resumes.
//!
//! Without the feature `mpi` the two ranks are those of a ring in this process. With it, they are
//! also two processes, which `$MPIRUN` starts (default: `mpirun`), for example
//! `MPIRUN="mpirun --oversubscribe"`.

use std::{fs, path::PathBuf};

use candle_core::Result;

#[path = "../examples/train.rs"]
#[allow(dead_code, reason = "main is the example's")]
mod train;

/// Variable that holds the arguments of a rank that a test starts.
#[cfg(feature = "mpi")]
const ARGUMENTS: &str = "ANNULUS_CANDLE_TRAIN";

fn file(name: &str) -> PathBuf {
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    folder.join(format!("{name}-{}.safetensors", std::process::id()))
}

/// Trains in this process, and returns the checkpoint.
fn train_here(arguments: &str, name: &str) -> Result<Vec<u8>> {
    let path = file(name);
    let whole = format!("--leaves 3 {arguments} --save {}", path.display());
    train::train(&whole.split(' ').map(String::from).collect::<Vec<String>>())?;
    Ok(fs::read(path)?)
}

#[test]
fn local_ranks_and_a_resumed_run_give_the_same_checkpoint() -> Result<()> {
    let one = train_here("--steps 2", "one")?;
    assert!(train_here("--steps 1", "first")? != one);
    assert!(train_here("--steps 2 --local-ranks 2", "two")? == one);
    train_here("--steps 1 --local-ranks 2", "stopped")?;
    let resume = format!("--steps 2 --resume {}", file("stopped").display());
    assert!(train_here(&resume, "resumed")? == one);
    Ok(())
}

/// Starts two ranks that train, and returns the checkpoint.
#[cfg(feature = "mpi")]
fn train_over_mpi(arguments: &str, name: &str) -> Result<Vec<u8>> {
    let path = file(name);
    let whole = format!("--leaves 3 {arguments} --save {}", path.display());
    let mpirun = std::env::var("MPIRUN").unwrap_or_else(|_| "mpirun".into());
    let mut words = mpirun.split(' ');
    let output = std::process::Command::new(words.next().unwrap_or_default())
        .args(words)
        .args(["-n", "2"])
        .arg(std::env::current_exe()?)
        .args(["--exact", "one_rank_of_mpi", "--ignored", "--nocapture"])
        .env(ARGUMENTS, whole)
        .output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    Ok(fs::read(path)?)
}

#[cfg(feature = "mpi")]
#[test]
#[ignore = "a process that the test of two ranks starts"]
fn one_rank_of_mpi() -> Result<()> {
    let launch = annulus_candle::annulus::comm::mpi::Launch::begin();
    let _launch = launch.map_err(candle_core::Error::wrap)?;
    let arguments = std::env::var(ARGUMENTS).map_err(candle_core::Error::wrap)?;
    train::train(&arguments.split(' ').map(String::from).collect::<Vec<String>>())
}

#[cfg(feature = "mpi")]
#[test]
fn two_ranks_of_mpi_and_a_resumed_run_give_the_same_checkpoint() -> Result<()> {
    let one = train_here("--steps 2", "one-local")?;
    assert!(train_over_mpi("--steps 2", "two-mpi")? == one);
    train_over_mpi("--steps 1", "stopped-mpi")?;
    let resume = format!("--steps 2 --resume {}", file("stopped-mpi").display());
    assert!(train_here(&resume, "resumed-local")? == one);
    Ok(())
}
