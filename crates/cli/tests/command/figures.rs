//! Figures of `plan`, `bench` and `make`.

use annulus::{Attention, Dims, Division, Layout, LocalRing, Plan, Setup, comm::ring::PassKind};
use serde_json::{Value, json};

use crate::support::{Folder, Tensors};

/// Sums a field of the elements of an array.
fn sum(array: &Value, field: &str) -> u64 {
    array.as_array().unwrap().iter().map(|of| of[field].as_u64().unwrap()).sum()
}

/// Sums the bytes of the messages `field` of steps.
fn sent(steps: &Value, field: &str) -> u64 {
    steps.as_array().unwrap().iter().map(|step| sum(&step[field], "bytes")).sum()
}

/// Returns the names of the strategies of a plan.
fn names(plan: &Value) -> Vec<&str> {
    let all = plan["strategies"].as_array().unwrap();
    all.iter().map(|of| of["name"].as_str().unwrap()).collect()
}

fn share(plan: &Value) -> f64 {
    plan["bytes_sent_total"].as_f64().unwrap() / plan["bytes_full_ring_total"].as_f64().unwrap()
}

#[test]
fn of_more_ranks_than_are_summed_the_program_of_one_is_shown() {
    let folder = Folder::new("plan_one_rank");
    let ring = "plan --causal --q-len 8192 --ranks";
    let summed = folder.plan("--causal --q-len 8192 --ranks 1024 --rank 17");
    let program = |planned: &Value| {
        ["sends", "sends_gradients"].map(|field| sent(&planned["program"]["steps"], field))
    };
    let [blocks, gradients] = program(&summed);
    let of_ranks = summed["per_rank"].as_array().unwrap();
    let rank = of_ranks.iter().find(|of| of["rank"] == 17).unwrap();
    assert_eq!(rank["bytes_sent"], blocks);
    assert_eq!(rank["backward_bytes_sent"], blocks + gradients);
    let many = folder.succeed(&format!("{ring} 1024 --rank 17")).out;
    assert!(many.contains("program of rank 17") && many.contains("more steps"), "{many}");
    assert!(many.lines().count() < 80, "{many}");
    let one = folder.plan("--causal --q-len 8192 --ranks 1025 --rank 17");
    assert_eq!((&one["layout"], &one["direction"]), (&summed["layout"], &summed["direction"]));
    let [blocks, gradients] = program(&one);
    assert!(blocks > 0 && gradients > 0);
    assert_eq!(one["bytes_sent"], blocks);
    assert_eq!(one["backward_bytes_sent"], blocks + gradients);
    let rows = [8, 7].map(Value::from);
    assert!(rows.contains(&one["q_rows"]) && rows.contains(&one["kv_rows"]), "{one}");
    let forward = folder.plan("--causal --q-len 8192 --ranks 1025 --rank 17 --forward-only");
    assert_eq!(program(&forward), [blocks, 0]);
    assert!(forward["backward_bytes_sent"].is_null());
    let in_order = folder.plan("--causal --q-len 600000 --ranks 1025 --rank 3 --reproducible");
    assert!(!in_order["program"]["query_steps"].as_array().unwrap().is_empty());
    let text = folder.succeed(&format!("{ring} 1025 --rank 17")).out;
    for words in ["025 ranks · zigzag layout", "strategy  ring, relay-", "program of rank 17"] {
        assert!(text.contains(words), "{words}: {text}");
    }
    folder.run(&format!("{ring} 1025")).failed(2, &["--ranks: got 1025", "--rank R"]);
    folder.run(&format!("{ring} 1025 --rank 1025")).failed(2, &["--rank: got 1025"]);
    for (flags, argument) in [
        ("--strategy auto", "--strategy: got auto"),
        ("--strategy heads:5", "--strategy: got heads:5"),
        ("--strategy once-per-node:3", "--strategy: got once-per-node:3"),
        ("--svg ring.svg", "--svg: got ring.svg"),
    ] {
        folder.run(&format!("{ring} 1025 --rank 17 {flags}")).failed(2, &[argument, "1024"]);
    }
    assert_eq!(folder.names(), [""; 0]);
}

#[test]
fn a_given_strategy_is_listed_under_its_own_name() {
    let folder = Folder::new("plan_given_strategy");
    folder.write_machine(1e10, 1e12);
    let on = ["", "--machine machine.json"];
    // more ranks than are stepped: alone
    for machine in on {
        for given in ["ring", "all-gather", "once-per-node:4", "once-per-node:20", "heads:4"] {
            let flags = format!("--causal --q-len 5120 --ranks 320 {machine} --strategy {given}");
            let planned = folder.plan(&flags);
            assert_eq!(names(&planned), [given], "{flags}");
            assert_eq!(planned["strategy"], given);
            let of = &planned["strategies"][0];
            assert_eq!(of["bytes_sent_total"], planned["bytes_sent_total"], "{flags}");
            assert_eq!(of["backward_bytes_sent_total"], planned["backward"]["sent"], "{flags}");
            assert_eq!(of["time_predicted"].is_f64(), !machine.is_empty(), "{of}");
        }
    }
    let many = "--causal --q-len 5120 --ranks 320 --strategy once-per-node --machine machine.json";
    assert_eq!(names(&folder.plan(many)), ["once-per-node:4"]);
    let text = folder.succeed(&format!("plan {many}")).out;
    assert!(text.contains("\n* once-per-node:4 "), "{text}");
    // of few ranks among all, once: also with other nodes than those of the machine
    let few = folder
        .plan("--causal --q-len 512 --ranks 16 --machine machine.json --strategy once-per-node:2");
    let names = names(&few);
    assert!(names.len() > 3, "{names:?}");
    assert_eq!(names.iter().filter(|name| **name == "once-per-node:2").count(), 1, "{names:?}");
}

#[test]
fn sums_past_64_bits_do_not_saturate() {
    let folder = Folder::new("plan_large_sums");
    let flags = "--q-len 1000000 --ranks 8 --batch 100000000 --heads 1";
    let figures = folder.plan(flags);
    assert_eq!(figures["work_max_over_mean"], 1.0);
    assert_eq!(figures["pairs_total"].as_f64(), Some(1e20));
    // seven hops of 10⁸ · 10⁶ rows of 2 · 64 elements of 4 bytes
    let bytes = [&figures["bytes_sent_total"], &figures["forward"]["full_ring"]];
    assert!(bytes.iter().all(|bytes| bytes.as_f64() == Some(7e14 * 512.0)), "{bytes:?}");
    let result = folder.succeed(&format!("plan {flags}"));
    assert!(result.out.contains("the busiest rank has 1.000 times the mean"), "{}", result.out);
}

#[test]
fn figures_of_ranks_and_steps_add_up_to_the_totals() {
    let folder = Folder::new("plan_sums");
    let plan = folder.plan(
        "--causal --q-len 1000 --kv-len 1200 --ranks 5 --heads 4 --kv-heads 2 --head-dim 8 \
         --dtype bf16",
    );
    assert_eq!(plan["ranks"], 5);
    let sum_of = |of: &str| sum(&plan["per_rank"], of);
    assert_eq!(sum_of("q_rows"), 1000);
    assert_eq!(sum_of("kv_rows"), 1200);
    assert_eq!(sum_of("pairs"), 4 * 1000 * 1001 / 2);
    assert_eq!(Some(sum_of("bytes_sent")), plan["bytes_sent_total"].as_u64());
    assert_eq!(Some(sum_of("backward_bytes_sent")), plan["backward"]["sent"].as_u64());
    // each hop of the full ring sends all keys and values once
    assert_eq!(plan["bytes_full_ring_total"], 4 * 1200 * 2 * (8 + 8) * 2);
    let steps = plan["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 5);
    let of_ranks = || steps.iter().flat_map(|step| step["ranks"].as_array().unwrap());
    assert_eq!(
        of_ranks().map(|rank| rank["pairs"].as_u64().unwrap()).sum::<u64>(),
        sum_of("pairs")
    );
    assert_eq!(
        of_ranks().map(|rank| sum(&rank["sends"], "bytes")).sum::<u64>(),
        sum_of("bytes_sent")
    );
}

#[test]
fn plans_of_many_ranks_have_no_steps() {
    let folder = Folder::new("plan_many_ranks");
    folder.succeed(
        "plan --causal --q-len 3000 --ranks 200 --layout zigzag --svg many.svg --json many.json",
    );
    let svg = folder.text("many.svg");
    assert!(svg.len() < 3_000_000, "{} bytes", svg.len());
    assert!(
        svg.contains("not drawn for more than 128 ranks")
            && svg.contains("1 of 4 runs of rows")
            && !svg.contains("NaN")
    );
    let many: Value = serde_json::from_str(&folder.text("many.json")).unwrap();
    assert_eq!(many["schedule_checked"], false);
    assert!(many["notes"][0].as_str().unwrap().contains("more than 128 ranks"));
    assert_eq!(many["steps"].as_array().map(Vec::len), Some(0));
    assert_eq!(many["per_rank"].as_array().unwrap().len(), 200);
    folder.succeed(
        "plan --causal --q-len 1000 --ranks 128 --layout contiguous --svg few.svg --json few.json",
    );
    let few: Value = serde_json::from_str(&folder.text("few.json")).unwrap();
    assert_eq!(few["schedule_checked"], true);
    assert!(few.get("notes").is_none());
    assert_eq!(few["steps"][5]["ranks"].as_array().unwrap().len(), 128);
    assert!(!folder.text("few.svg").contains("more than 128 ranks"));
}

#[test]
fn plans_of_more_than_256_ranks_are_summaries() {
    let folder = Folder::new("plan_summary");
    folder.succeed("plan --causal --q-len 40000 --ranks 1000 --svg many.svg --json many.json");
    let svg = folder.text("many.svg");
    assert!(svg.len() < 1_000_000 && svg.contains("not drawn for more than 128 ranks"));
    assert!(svg.contains("1 of 4 ranks") && !svg.contains("NaN"));
    let json = folder.text("many.json");
    let many: Value = serde_json::from_str(&json).unwrap();
    assert!(json.len() < 10_000);
    assert!(many["notes"][1].as_str().unwrap().contains("more than 256 ranks"));
    assert_eq!(many["steps"].as_array().map(Vec::len), Some(0));
    // causal zigzag downwards: three quarters of the full ring
    assert_eq!(share(&many), 0.75);
    assert_eq!(many["pairs_total"], 8 * 40_000 * 40_001_u64 / 2);
}

#[test]
fn figures_are_formatted_alike() {
    let folder = Folder::new("plan_style");
    let result = folder.succeed("plan --q-len 1 --ranks 1").out;
    assert!(result.starts_with("full · 1 query × 1 key · 1 rank · "), "{result}");
    let result = folder.succeed("plan --q-len 16384 --kv-len 8192 --ranks 2 --value-dim 32").out;
    assert!(
        result.starts_with("full · 16 384 queries × 8 192 keys · 2 ranks · ")
            && result.contains(" 4 096 "),
        "{result}"
    );
    // both KV shards, 8192 rows together, of 8 heads with 64 + 32 floats
    assert!(result.contains("forward   24.0 MiB sent"), "{result}");
}

#[test]
fn pictures_are_drawn_for_rings_of_any_size() {
    let folder = Folder::new("plan_svg");
    for (number, flags) in [
        "--q-len 0 --ranks 1",
        "--q-len 1 --ranks 3",
        "--causal --q-len 7 --ranks 64",
        "--causal --q-len 100000 --ranks 64 --layout striped",
        "--causal --window 10,none --first-visible 2 --chunk 99 --align bottom-right --q-len 300 \
         --kv-len 500 --ranks 7",
        "--prefix 100 --q-len 1000 --ranks 4",
    ]
    .into_iter()
    .enumerate()
    {
        let result =
            folder.succeed(&format!("plan {flags} --svg {number}.svg --json {number}.json"));
        assert!(result.out.contains("work"));
        let svg = folder.text(&format!("{number}.svg"));
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"), "{flags}");
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{flags}");
        let json = folder.text(&format!("{number}.json"));
        assert!(serde_json::from_str::<Value>(&json).is_ok());
    }
    assert_eq!(folder.names().len(), 12);
}

/// Checks that a line of `bench` has the fields of the other benchmarks.
pub(crate) fn has_bench_fields(line: &Value) {
    let fields = "what dtype threads batch heads head_dim n causal ms gflops gflops_cpu";
    for field in fields.split(' ') {
        assert!(!line[field].is_null(), "{field} in {line}");
    }
}

#[test]
fn bench_lines_have_the_fields_of_the_other_benchmarks() {
    let folder = Folder::new("bench");
    let result =
        folder.succeed("bench --ns 64 --ds 16 --heads 2 --causal false,true --dtype f32,bf16");
    let lines: Vec<Value> =
        result.out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 8);
    for line in &lines {
        has_bench_fields(line);
        assert_eq!((&line["backend"], &line["clock"]), (&Value::from("cpu"), &Value::from("host")));
    }
    assert_eq!(
        (&lines[0]["what"], &lines[1]["what"]),
        (&Value::from("fwd"), &Value::from("fwd+bwd"))
    );
    assert_eq!(
        (lines[0]["pairs"].as_f64(), lines[2]["pairs"].as_f64()),
        (Some(2.0 * 4096.0), Some(4096.0))
    );
    let bench = "bench --causal true --heads 2 --ds 8 --what fwd";
    let packed = folder.json(&format!("{bench} --documents 10,20 --ranks 2"));
    assert_eq!(packed["pairs"], 2.0 * (55.0 + 210.0));
    let token = folder.json(&format!("{bench} --q-len 1 --kv-len 50 --align bottom-right"));
    assert_eq!(token["pairs"], 100.0);
}

#[test]
fn equal_arguments_of_make_give_equal_files() {
    let folder = Folder::new("make");
    let flags = "--q-len 50 --kv-len 60 --heads 4 --kv-heads 2 --head-dim 6 --value-dim 5 \
                 --dtype bf16 --backward --bias 1hqk --sinks per-head --sinks-count 3 --mask 0.5 \
                 --segments 4 --documents 20,30";
    folder.succeed(&format!("make --output a.safetensors {flags}"));
    folder.succeed(&format!("make --output b.safetensors {flags}"));
    folder.succeed(&format!("make --output c.safetensors {flags} --seed 1"));
    let bytes = |name| std::fs::read(folder.path(name)).unwrap();
    assert_eq!(bytes("a.safetensors"), bytes("b.safetensors"));
    assert_ne!(bytes("a.safetensors"), bytes("c.safetensors"));
    let made = Tensors::read(&folder.path("a.safetensors"));
    let shape = |name: &str| made.all[name].1.clone();
    assert_eq!(shape("query"), [1, 50, 4, 6]);
    assert_eq!(shape("value"), [1, 60, 2, 5]);
    assert_eq!(shape("dout"), [1, 50, 4, 5]);
    assert_eq!(shape("dlse"), [1, 4, 50]);
    assert_eq!(shape("bias"), [1, 4, 50, 60]);
    assert_eq!(shape("softmax_aux"), [4, 3]);
    assert_eq!(shape("attention_mask"), [1, 1, 50, 60]);
    assert_eq!(shape("q_segment_ids"), [1, 50]);
    let ends: Vec<i64> = made.all["cum_seqlens_k"]
        .2
        .as_chunks::<8>()
        .0
        .iter()
        .map(|bytes| i64::from_le_bytes(*bytes))
        .collect();
    assert_eq!(ends, [0, 20, 50]);
}

#[test]
fn a_reproducible_plan_has_the_memory_of_partial_results() {
    let folder = Folder::new("plan_reproducible");
    let flags = "--causal --q-len 8192 --ranks 8 --layout contiguous --heads 2 --head-dim 16";
    assert_eq!(folder.plan(flags)["leaves"], Value::Null);
    let planned = folder.plan(&format!("{flags} --reproducible --rank 3"));
    let leaves = &planned["leaves"];
    assert_eq!((leaves["rows"].as_u64(), leaves["ranks_planned"].as_u64()), (Some(256), Some(8)));
    // 1,024 queries and 2 heads of 16 accumulators, maximum and sum
    let results = leaves["most_partial_results"].as_u64().unwrap();
    assert!((2..8).contains(&results), "{results}");
    assert_eq!(leaves["most_bytes"].as_u64(), Some(results * 1024 * 2 * 18 * 4));
    let text = folder.succeed(&format!("plan {flags} --reproducible --rank 3")).out;
    assert!(text.contains(&format!("at most {results} partial results")), "{text}");
    assert!(text.contains("queries of a backward pass, rank 3"), "{text}");

    // what the ring itself predicts, and allocates
    let attention = Setup::from((
        Attention::new().causal(true).reproducible(true),
        Division::new().layout(Layout::Contiguous),
    ));
    let ring = LocalRing::new(&attention, Dims::new(1, 8192, 2, 16), 8).unwrap();
    let most = ring.plans().map(Plan::leaf_bytes).max();
    assert_eq!(leaves["most_bytes_with_backward"].as_u64(), most);
    for (pass, name) in [(PassKind::Forward, "forward"), (PassKind::Backward, "backward")] {
        let sent: u64 = ring.plans().map(|plan| plan.bytes_predicted(pass)).sum();
        assert_eq!(planned[name]["sent"].as_u64(), Some(sent), "{name}");
    }
    let sent = sent(&planned["program"]["query_steps"], "sends");
    let [forward, backward] = [PassKind::Forward, PassKind::Backward]
        .map(|pass| ring.plans().nth(3).unwrap().bytes_predicted(pass));
    assert_eq!(sent, backward - forward);
}

#[test]
fn strategies_are_compared_by_bytes() {
    let folder = Folder::new("plan_strategies");
    let flags = "--q-len 4096 --ranks 8 --heads 32 --head-dim 64 --dtype bf16";
    let auto = folder.plan(&format!("{flags} --strategy auto"));
    assert_eq!(auto["strategy"], "all-to-all");
    let strategies = auto["strategies"].as_array().unwrap();
    let names = names(&auto);
    let heads = ["ring", "heads:2", "heads:4", "all-to-all"];
    let grids = ["grid:4x2", "grid:2x2x2", "grid:4x1x2", "grid:2x4", "grid:2x1x4", "pass-q"];
    assert_eq!(names, [&heads[..], &grids, &["all-gather"]].concat());
    assert_eq!(strategies[2]["grid"], json!([4, 2, 1]));
    assert_eq!(strategies[5]["grid"], json!([2, 2, 2]));
    // a published strategy is printed under its name, with its form
    assert_eq!(
        (strategies[3]["form"].as_str(), strategies[0].get("form")),
        (Some("heads:8"), None)
    );
    assert_eq!(folder.plan(&format!("{flags} --strategy grid:1x8"))["strategy"], "pass-q");
    let text = folder.succeed(&format!("plan {flags} --strategy heads:8")).out;
    assert!(text.contains("\nstrategy  all-to-all: "), "{text}");
    assert!(text.contains("\n* all-to-all (heads:8) "), "{text}");
    // to each of 7 ranks 512 rows of 4 heads of q, k, v and out, lse, maximum and sum
    assert_eq!(strategies[3]["bytes_max_rank"], 7 * 512 * 4 * (4 * 64 * 2 + 3 * 4));
    for (name, chosen) in names.iter().zip(strategies) {
        let planned = folder.plan(&format!("{flags} --strategy {name}"));
        assert_eq!(planned["strategy"], **name);
        assert_eq!(planned["bytes_sent_total"], chosen["bytes_sent_total"]);
        assert_eq!(planned["strategies"], auto["strategies"]);
        let ranks = &planned["per_rank"];
        assert_eq!(chosen["bytes_sent_total"], sum(ranks, "bytes_sent"));
        assert_eq!(sum(ranks, "pairs"), 32 * 4096 * 4096);
        assert_eq!((sum(ranks, "q_rows"), ranks.as_array().unwrap().len()), (4096, 8));
    }
    // what the plans themselves predict, and allocate
    let dims = Dims { q_heads: 4, ..Dims::new(1, 1000, 4, 16).kv_heads(2) };
    let flags = "--causal --q-len 1000 --ranks 8 --heads 4 --kv-heads 2 --head-dim 16";
    let planned = folder.plan(&format!("{flags} --strategy ring"));
    for of in planned["strategies"].as_array().unwrap() {
        let strategy = of["name"].as_str().unwrap().parse().unwrap();
        let ring = LocalRing::new(
            (Attention::new().causal(true), Division::new().strategy(strategy)),
            dims,
            8,
        )
        .unwrap();
        let passes = [PassKind::Forward, PassKind::Backward];
        let sent = |pass| ring.plans().map(|plan| plan.bytes_predicted(pass)).sum::<u64>();
        assert_eq!(of["bytes_sent_total"], sent(passes[0]), "{strategy}");
        assert_eq!(of["backward_bytes_sent_total"], sent(passes[1]), "{strategy}");
        let memory = ring.plans().map(|plan| plan.buffer_bytes()).max().unwrap();
        let bound = of["memory_max_rank"].as_u64().unwrap();
        assert!(memory <= bound && bound < 3 * memory, "{strategy}: {memory} of {bound}");
    }
    let text = folder.succeed(&format!("plan {flags} --strategy heads:2 --svg a.svg --rank 5")).out;
    assert!(text.contains("heads are divided among 2 ranks; a ring over 4 groups"), "{text}");
    let text = folder.succeed(&format!("plan {flags} --strategy grid:2x4 --svg b.svg")).out;
    assert!(text.contains("keys are divided among 4 ranks; a ring over 2 groups"), "{text}");
    let text = folder.succeed(&format!("plan {flags} --strategy grid:2x2x2")).out;
    let want = "heads, and keys in 2 columns, are divided among 4 ranks; a ring over 2 groups";
    assert!(text.contains(want), "{text}");
    let refused = folder.run(&format!("plan {flags} --strategy grid:2x4 --reproducible"));
    assert!(refused.code != 0 && refused.err.contains("reproducible"), "{}", refused.err);
}

#[test]
fn attend_and_bench_print_the_name_of_the_strategy() {
    let folder = Folder::new("named_strategy");
    folder.succeed("make --output in.st --q-len 64 --heads 4 --head-dim 8");
    let attend = "attend --input in.st --output out.st --ranks 4 --threads 1 --json";
    let bench = "bench --what fwd --dtype f32 --ns 64 --ds 8 --heads 4 --ranks 4 --threads 1";
    // grids divide the pairs that a ring has
    let pairs = 4 * 64 * 64;
    for (given, want) in [
        ("ring", "ring"),
        ("heads:2", "heads:2"),
        ("heads:4", "all-to-all"),
        ("grid:1x4", "pass-q"),
        ("all-gather", "all-gather"),
        ("once-per-node:2", "once-per-node:2"),
        ("pass-q", "pass-q"),
    ] {
        for line in [attend, &format!("{bench} --causal true")] {
            let printed = folder.json(&format!("{line} --strategy {given}"));
            assert_eq!(printed["strategy"], want, "{line} --strategy {given}");
            let of_attend = &printed["visible_pairs"];
            assert!(of_attend.is_null() || *of_attend == f64::from(pairs), "{printed}");
        }
    }
}

#[test]
fn the_picture_of_a_grid_has_the_bytes_and_the_exchanges_of_all_ranks() {
    let folder = Folder::new("plan_exchanges");
    let of = |strategy: &str| {
        folder.succeed(&format!(
            "plan --q-len 96 --ranks 4 --heads 4 --head-dim 8 --strategy {strategy} --svg p.svg \
             --json p.json"
        ));
        let figures: Value = serde_json::from_str(&folder.text("p.json")).unwrap();
        (folder.text("p.svg"), figures)
    };
    // 24 rows of q, k and v in one head of 8 elements of 4 bytes to each of 3 ranks, from 4
    // ranks; then out, lse, maximum and sum
    let (svg, figures) = of("all-to-all");
    assert_eq!(figures["passes"][0]["before"], 3 * 4 * 3 * 24 * 32);
    assert_eq!(figures["passes"][0]["rings"], 0);
    assert_eq!(figures["passes"][0]["after"], 4 * 3 * 24 * (32 + 12));
    for words in ["4 ranks · contiguous layout", "heads are divided among 4 ranks", "27.0 KiB"] {
        assert!(svg.contains(words), "{words}: {svg}");
    }
    assert!(!svg.contains("every rank owns all rows that it needs"));
    for strategy in ["heads:2", "grid:2x2", "grid:2x1x2", "pass-q"] {
        let (svg, figures) = of(strategy);
        for (pass, field) in ["forward", "backward"].into_iter().enumerate() {
            let sum = ["before", "rings", "after"]
                .iter()
                .map(|part| figures["passes"][pass][part].as_u64().unwrap());
            assert_eq!(figures[field]["sent"], sum.sum::<u64>(), "{strategy} {field}");
        }
        assert_eq!(figures["schedule_checked"], true, "{strategy}");
        assert!(svg.contains("Exchanges around the rings"), "{strategy}");
        assert_eq!(svg.contains("parts of dq merged"), strategy != "heads:2", "{strategy}");
    }
    let (svg, figures) = of("ring");
    assert!(figures.get("passes").is_none() && !svg.contains("Exchanges"));
}

#[test]
fn the_picture_of_a_grid_has_the_ring_of_its_first_ranks() {
    let folder = Folder::new("plan_columns");
    let has = |svg: &str, text: &str| svg.contains(&format!(">{text}</text>"));
    for strategy in ["grid:2x4", "grid:2x2x2", "heads:4"] {
        let flags = "plan --q-len 96 --ranks 8 --heads 4 --head-dim 8 --svg p.svg --strategy";
        folder.succeed(&format!("{flags} {strategy}"));
        let svg = folder.text("p.svg");
        let steps = &svg[svg.find("Step by step").unwrap()..];
        // rank 4 is the first of the second of two groups; each rank has work
        for rank in 0..8 {
            assert_eq!(has(steps, &format!("rank {rank}")), rank % 4 == 0, "{rank}: {steps}");
            assert!(has(&svg, &format!("rank {rank}")), "{rank}: {svg}");
        }
        assert!(steps.contains("→ 4: ") && steps.contains("→ 0: "), "{steps}");
    }
}

#[test]
fn figures_of_a_backward_pass_are_null() {
    let folder = Folder::new("plan_forward_only");
    folder.write_machine(1e10, 1e12);
    let shape = "--causal --q-len 4096 --ranks 8 --machine machine.json --rank 1";
    for strategy in ["ring", "heads:2", "grid:4x2", "all-gather", "ring --reproducible"] {
        let flags = format!("{shape} --strategy {strategy}");
        let both = folder.plan(&flags);
        let forward = folder.plan(&format!("{flags} --forward-only"));
        assert_eq!(both["forward"], forward["forward"], "{strategy}");
        assert!(both["backward"]["sent"].as_u64().unwrap() > 0, "{strategy}");
        assert!(forward["backward"].is_null(), "{strategy}");
        let of = |plan: &Value| {
            let name = plan["strategy"].clone();
            let all = plan["strategies"].as_array().unwrap().iter();
            all.clone().find(|of| of["name"] == name).unwrap().clone()
        };
        let [of_both, of_forward] = [&both, &forward].map(of);
        for field in ["backward_bytes_sent_total", "backward_bytes_max_rank"] {
            assert!(of_forward[field].is_null() && of_both[field].is_u64(), "{strategy} {field}");
        }
        assert_eq!(of_both["bytes_sent_total"], of_forward["bytes_sent_total"], "{strategy}");
        for field in ["memory_max_rank", "time_predicted", "bytes_between_nodes"] {
            let number = |of: &Value| of[field].as_f64().unwrap();
            let [all, less] = [number(&of_both), number(&of_forward)];
            assert!(less > 0.0 && less < all, "{strategy} {field}: {less} {all}");
        }
        let ranks = forward["per_rank"].as_array().unwrap();
        assert!(ranks.iter().all(|rank| rank["backward_bytes_sent"].is_null()), "{strategy}");
        if strategy.starts_with("grid") {
            assert_eq!(forward["passes"].as_array().unwrap().len(), 1);
            assert_eq!(forward["passes"][0], both["passes"][0]);
        }
        let program = &forward["program"];
        assert_eq!(program.get("query_steps"), None, "{strategy}");
        for step in program["steps"].as_array().unwrap() {
            assert_eq!(step["sends_gradients"], json!([]), "{strategy}");
        }
        if strategy.ends_with("reproducible") {
            let leaves = &forward["leaves"];
            assert_eq!(leaves["most_bytes"], both["leaves"]["most_bytes"]);
            assert!(leaves["most_bytes_with_backward"].is_null());
            assert!(leaves["most_partial_gradients"].is_null());
        }
        let text = folder.succeed(&format!("plan {flags} --forward-only --svg plan.svg")).out;
        assert!(text.contains(" sent forward, at most "), "{text}");
        let svg = folder.text("plan.svg");
        for text in [text, svg] {
            for word in ["backward", "bwd", "gradient"] {
                assert!(!text.contains(word), "{strategy} {word}: {text}");
            }
        }
    }
}

#[test]
fn a_picture_names_the_strategy_of_a_route() {
    let folder = Folder::new("plan_picture_of_a_route");
    let picture = |strategy: &str| {
        let flags = "--causal --q-len 512 --ranks 8 --node-ranks 4 --svg plan.svg";
        folder.succeed(&format!("plan {flags} --strategy {strategy}"));
        folder.text("plan.svg")
    };
    assert!(picture("all-gather").contains(">all-gather: 7 hops; owners send blocks directly"));
    assert!(picture("once-per-node").contains(">once-per-node:4: "));
    assert!(!picture("ring").contains("all-gather"));
}
