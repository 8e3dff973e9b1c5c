//! The README's lines for the command, copied one by one, in order, into an empty folder.

use crate::{check::write_cases, support::Folder};

/// The lines of the fenced blocks of the README's section on the command.
fn lines() -> Vec<String> {
    let readme = concat!(env!("CARGO_MANIFEST_DIR"), "/../../README.md");
    let text = std::fs::read_to_string(readme).unwrap();
    let section = text.split("\n## The command\n").nth(1).unwrap().split("\n## ").next().unwrap();
    // every other piece is fenced
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
fn lines_of_the_readme_run_in_order_from_an_empty_folder() {
    let lines = lines();
    let under_a_launcher = lines.iter().position(|line| line.starts_with("mpirun ")).unwrap();
    assert!(under_a_launcher >= 7, "{lines:?}");
    let folder = Folder::new("readme");
    let cases = Folder::new("readme_cases");
    write_cases(&cases);
    let cases = cases.path("cases");
    // those from the first under a launcher on are run by scripts/mpi-command
    for line in &lines[..under_a_launcher] {
        let arguments =
            line.strip_prefix("annulus ").unwrap().replace("DIR", cases.to_str().unwrap());
        folder.succeed(&arguments);
    }
    let made = ["in.st", "out.st", "plan.json", "plan.svg", "trace.json", "traces"];
    assert_eq!(folder.names(), made);
    let subcommand = |line: &String| line.split_whitespace().nth(1).unwrap().to_owned();
    let run: Vec<String> = lines[..under_a_launcher].iter().map(subcommand).collect();
    for wanted in ["doctor", "make", "attend", "trace", "plan", "bench", "check"] {
        assert!(run.iter().any(|name| name == wanted), "{wanted} is not in the README");
    }
}
