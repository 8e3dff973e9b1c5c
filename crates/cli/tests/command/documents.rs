//! Packed documents on the balanced layout: `plan`, `attend`, `check`, `bench` and `demo`.

use crate::{check::write_cases, support::Folder};

/// One long document and many short ones, 4096 rows.
fn documents() -> String {
    let lens = [1500, 3, 700, 120, 61, 12].into_iter().chain([100; 17]);
    lens.map(|len| len.to_string()).collect::<Vec<_>>().join(",")
}

#[test]
fn a_balanced_plan_sends_only_rows_that_are_needed() {
    let folder = Folder::new("documents_plan");
    let documents = documents();
    let flags = format!("--causal --documents {documents} --ranks 8 --heads 2 --layout");
    let plan = |layout: &str| folder.plan(&format!("{flags} {layout}"));
    let balanced = plan("balanced");
    assert_eq!((&balanced["layout"], &balanced["q_len"]), (&"balanced".into(), &4096.into()));
    assert_eq!((&balanced["documents"], &balanced["redundancy"]), (&23.into(), &1.0.into()));
    assert_eq!(balanced["schedule_checked"], true);
    for figure in ["work_max_over_mean", "rows_max_over_mean"] {
        let imbalance = balanced[figure].as_f64().unwrap();
        assert!((1.0..=1.02).contains(&imbalance), "{figure}: {imbalance}");
    }
    let pairs: u64 =
        documents.split(',').map(|len| len.parse::<u64>().unwrap()).map(|n| n * (n + 1)).sum();
    assert_eq!(balanced["pairs_total"], pairs);

    // the mask alone chooses a relay over all ranks, and a layout that divides each document
    let zigzag = plan("zigzag");
    assert_eq!(zigzag["pairs_total"], pairs);
    assert!(zigzag["redundancy"].as_f64().unwrap() > 1.5, "{}", zigzag["redundancy"]);
    assert!(zigzag["work_max_over_mean"].as_f64().unwrap() > 1.1);

    let line = format!("plan --causal --documents {documents} --ranks 8 --layout balanced");
    let table = folder.succeed(&line).out;
    assert!(table.starts_with("causal, 23 documents · 4 096 queries"), "{table}");
    assert!(table.contains("1.000 rows sent for each row that a rank needs"), "{table}");
}

#[test]
fn the_picture_shows_the_documents() {
    let folder = Folder::new("documents_picture");
    // a tile for each of 8 documents on the diagonal, and no other
    let line = "plan --documents 12,12,12,12,12,12,12,12 --ranks 8 --layout balanced --svg p.svg";
    folder.succeed(line);
    let svg = folder.text("p.svg");
    assert!(svg.contains("8 documents"), "{svg}");
    folder.succeed("plan --q-len 96 --ranks 8 --layout contiguous --svg q.svg");
    let all = folder.text("q.svg");
    // 96 cells of queries in 524 pixels; each has one run of visible tiles per owner of keys
    let tiles = |svg: &str| svg.matches("height=\"5.46\"").count();
    assert_eq!([tiles(&svg), tiles(&all)], [96, 96 * 8]);
}

#[test]
fn attention_over_documents_of_flags_and_files_is_the_same() {
    let folder = Folder::new("documents_attend");
    let make = "--q-len 400 --heads 4 --kv-heads 2 --head-dim 8 --dtype f64 --backward --quiet";
    folder.succeed(&format!("make --output plain.st {make}"));
    folder.succeed(&format!("make --output packed.st {make} --documents 130,20,250"));
    folder.succeed(&format!("make --output ids.st {make} --segments 5 --batch 2"));
    let flags = "--causal --backward --quiet";
    let attend = |input: &str, output: &str, more: &str| {
        folder.succeed(&format!("attend --input {input} --output {output} {flags} {more}"));
    };
    let balanced = "--ranks 4 --layout balanced";
    attend("plain.st", "flag.st", &format!("--documents 130,20,250 {balanced}"));
    attend("packed.st", "file.st", balanced);
    let bytes = |name: &str| std::fs::read(folder.path(name)).unwrap();
    assert_eq!(bytes("flag.st"), bytes("file.st"));
    attend("packed.st", "alone.st", "--ranks 1");
    let arrays = ["out", "lse", "dq", "dk", "dv"];
    folder.close(["flag.st", "alone.st"], &arrays, 1e-12);
    attend("ids.st", "o.st", balanced);
    attend("ids.st", "o1.st", "--ranks 1");
    folder.close(["o.st", "o1.st"], &arrays, 1e-12);

    let summary = format!("attend --input packed.st --output j.st --causal --json {balanced}");
    assert_eq!(folder.json(&summary)["layout"], "balanced");
    // whole leaves of 256 rows: two of four ranks have none
    attend("packed.st", "r4.st", &format!("--reproducible {balanced}"));
    attend("packed.st", "r1.st", "--reproducible --ranks 1");
    assert_eq!(bytes("r4.st"), bytes("r1.st"));
}

#[test]
fn the_strategy_is_chosen_for_the_documents() {
    let folder = Folder::new("documents_strategies");
    // a document for each rank, which a ring does not send; the mask alone decides for a grid
    folder.succeed("make --output in.st --q-len 64 --heads 8 --head-dim 8 --backward --quiet");
    let auto = "--layout contiguous --strategy auto --ranks 4 --threads 1";
    let attend = format!("attend --input in.st --output out.st --causal --backward --json {auto}");
    let bench = format!("bench --causal true --heads 8 --ds 8 --dtype f32 --what fwd+bwd {auto}");
    for (line, want) in [
        (format!("{attend} --documents 16,16,16,16"), "ring"),
        (attend, "grid:2x2"),
        (format!("{bench} --documents 16,16,16,16"), "ring"),
        (format!("{bench} --ns 64"), "grid:2x2"),
    ] {
        assert_eq!(folder.json(&line)["strategy"], want, "{line}");
    }
}

#[test]
fn documents_that_do_not_fit_are_refused() {
    let folder = Folder::new("documents_refused");
    folder.succeed("make --output in.st --q-len 64 --heads 1 --head-dim 4 --quiet");
    let packed = "make --output packed.st --q-len 64 --heads 1 --head-dim 4 --documents 60 --quiet";
    folder.succeed(packed);
    let fails = |line: &str, words: &[&str]| folder.run(line).failed(2, words);
    fails("plan --q-len 9 --documents 4,4 --ranks 2", &["--documents", "8 rows", "9"]);
    fails("plan --kv-len 9 --documents 4,4 --ranks 2", &["--documents", "8 rows", "9", "keys"]);
    fails("plan --documents 4,0 --ranks 2", &["--documents", "from 1"]);
    fails("demo --documents 4,0", &["--documents", "from 1"]);
    let once = "--strategy: got once-per-node, want several nodes with as many ranks each";
    for line in ["plan --documents 4,4", "attend --input in.st --output out.st"] {
        fails(&format!("{line} --ranks 2 --strategy once-per-node"), &[once]);
    }
    fails("bench --ns 64 --heads 2 --ds 8 --ranks 2 --strategy once-per-node", &[once]);
    let attend = "attend --output out.st --layout balanced --ranks 2";
    fails(&format!("{attend} --input in.st --documents 60"), &["--documents", "60 rows", "64"]);
    let both = folder.run(&format!("{attend} --input packed.st --documents 64"));
    both.failed(1, &["packed.st", "cum_seqlens_q", "--documents"]);
    assert!(!folder.path("out.st").exists());
}

#[test]
fn cases_demo_and_bench_run_on_the_balanced_layout() {
    let folder = Folder::new("documents_others");
    write_cases(&folder);
    let checked = folder.succeed("check cases --ranks 1,3 --layout balanced");
    assert!(checked.out.contains("4 passed, 0 failed"), "{checked:?}");
    let demo = folder.succeed("demo --documents 300,3,120 --ranks 3");
    assert!(demo.out.contains("423 tokens in 3 documents"), "{demo:?}");
    assert!(demo.out.contains("balanced") && demo.out.contains("verified 128 rows"), "{demo:?}");
    // more ranks than rows
    assert!(folder.succeed("demo --documents 3,2 --ranks 8").out.contains("verified 5 rows"));
    let bench = "bench --documents 40,24 --heads 1 --ds 8 --causal true --ranks 2 --what fwd";
    let line = folder.json(&format!("{bench} --layout balanced"));
    assert_eq!((&line["layout"], &line["q_len"]), (&"balanced".into(), &64.into()));
}
