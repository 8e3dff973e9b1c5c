//! Runs the command and checks its exit codes, files and messages.

#![allow(clippy::unwrap_used, reason = "a failed unwrap fails the test")]

mod arguments;
mod attend;
mod check;
#[cfg(feature = "cuda")]
mod cuda;
mod documents;
mod figures;
mod limits;
mod machine;
mod odd_files;
mod outputs;
mod running;
mod support;
#[cfg(feature = "wgpu")]
mod wgpu;

use crate::{check::write_cases, support::Folder};

/// Returns the lines of the fenced blocks in the page's section "In order".
fn lines() -> Vec<String> {
    let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/command.md");
    let text = std::fs::read_to_string(page).unwrap();
    let section = text.split("\n## In order\n").nth(1).unwrap().split("\n## ").next().unwrap();
    // every second part is a fenced block
    section
        .split("```")
        .skip(1)
        .step_by(2)
        .flat_map(str::lines)
        .filter(|line| !line.trim().is_empty())
        .map(str::to_owned)
        .collect()
}

#[test]
fn lines_of_the_page_run_in_order_from_an_empty_folder() {
    let lines = lines();
    let under_a_launcher = lines.iter().position(|line| line.starts_with("mpirun ")).unwrap();
    assert!(under_a_launcher >= 7, "{lines:?}");
    let folder = Folder::new("readme");
    let cases = Folder::new("readme_cases");
    write_cases(&cases);
    let cases = cases.path("cases");
    // scripts/mpi-command runs the lines from the first mpirun on
    for line in &lines[..under_a_launcher] {
        let arguments =
            line.strip_prefix("annulus ").unwrap().replace("DIR", cases.to_str().unwrap());
        folder.succeed(&arguments);
    }
    let made = ["in.st", "machine.json", "out.st", "plan.json", "plan.svg", "tokens.st"];
    assert_eq!(folder.names(), [&made[..], &["trace.json", "traces"]].concat());
    let subcommand = |line: &String| line.split_whitespace().nth(1).unwrap().to_owned();
    let run: Vec<String> = lines[..under_a_launcher].iter().map(subcommand).collect();
    let all = ["doctor", "make", "attend", "decode", "trace", "plan", "bench", "measure", "check"];
    for wanted in all {
        assert!(run.iter().any(|name| name == wanted), "{wanted} is not in docs/command.md");
    }
}
