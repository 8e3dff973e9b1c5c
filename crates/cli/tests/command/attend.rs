//! `attend` from file to file, compared with the oracle.

use annulus::{Attention, BiasOrder, SinkShape};
use annulus_core::{Batch, DType, DenseMask, Dims, oracle};
use ndarray::{Array, Array2, Array3, Array4};

use crate::{files::Tensors, support::Folder};

/// Command line of an input with every optional tensor.
const MAKE: &str = "make --output in.safetensors --batch 2 --q-len 23 --kv-len 29 --heads 4 \
                    --kv-heads 2 --head-dim 6 --value-dim 5 --backward --bias 1h1k \
                    --sinks per-head --sinks-count 2 --mask 0.7 --segments 3";
const DIMS: Dims =
    Dims { batch: 2, q_len: 23, kv_len: 29, q_heads: 4, kv_heads: 2, head_dim: 6, value_dim: 5 };

fn array4(file: &Tensors, name: &str) -> Array4<f64> {
    let shape = &file.all[name].1;
    Array::from_shape_vec([shape[0], shape[1], shape[2], shape[3]], file.numbers(name)).unwrap()
}

/// Batch of the input file.
fn batch(file: &Tensors) -> Batch {
    let ids = |name: &str| {
        let (_, shape, bytes) = &file.all[name];
        let ids = bytes.as_chunks::<4>().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).collect();
        Array2::from_shape_vec([shape[0], shape[1]], ids).unwrap()
    };
    let mask = file.all["attention_mask"].2.clone();
    let mask = Array4::from_shape_vec([1, 1, DIMS.q_len, DIMS.kv_len], mask).unwrap();
    Batch {
        q_segment_ids: Some(ids("q_segment_ids")),
        kv_segment_ids: Some(ids("kv_segment_ids")),
        attention_mask: Some(DenseMask::from_integers(mask.view())),
        ..Batch::default()
    }
}

/// Computes the output tensors with the oracle, by name.
fn expected(file: &Tensors, attention: &Attention) -> Vec<(&'static str, Vec<f64>)> {
    let spec = attention
        .clone()
        .dtype(DType::F64)
        .bias([1, 4, 1, 29])
        .softmax_aux(SinkShape::per_head(2))
        .spec(DIMS)
        .unwrap();
    let batch = batch(file);
    let q = array4(file, "query");
    let k = array4(file, "key");
    let v = array4(file, "value");
    let bias = array4(file, "bias");
    let dout = array4(file, "dout");
    let sinks = Array2::from_shape_vec([4, 2], file.numbers("softmax_aux")).unwrap();
    let dlse = Array3::from_shape_vec([2, 4, 23], file.numbers("dlse")).unwrap();
    let problem = oracle::Problem {
        spec: &spec,
        batch: &batch,
        q: q.view(),
        k: k.view(),
        v: v.view(),
        bias: Some(bias.view()),
        sinks: Some(sinks.view()),
    };
    let forward = oracle::forward(&problem).unwrap();
    let backward = oracle::backward(&problem, dout.view(), Some(dlse.view())).unwrap();
    let mut all = vec![
        ("out", forward.out.iter().copied().collect()),
        ("lse", forward.lse.iter().copied().collect()),
        ("dq", backward.dq.iter().copied().collect()),
        ("dk", backward.dk.iter().copied().collect()),
        ("dv", backward.dv.iter().copied().collect()),
        ("dbias", backward.dbias.iter().flatten().copied().collect()),
        ("dsoftmax_aux", backward.dsinks.iter().flatten().copied().collect()),
    ];
    if !spec.normalize {
        all.push(("max", forward.max.iter().copied().collect()));
        all.push(("sum", forward.sum.iter().copied().collect()));
    }
    all
}

fn same(got: &Tensors, want: &[(&'static str, Vec<f64>)], tolerance: f64) {
    for (name, want) in want {
        let got = got.numbers(name);
        assert_eq!(got.len(), want.len(), "{name}");
        for (got, want) in got.iter().zip(want) {
            assert!(
                got == want || (got - want).abs() <= tolerance * want.abs().max(1.0),
                "{name}: {got} for {want}"
            );
        }
    }
    assert_eq!(got.all.len(), want.len());
}

#[test]
fn flags_change_the_result_as_the_oracle_does() {
    let folder = Folder::new("attend_all");
    folder.succeed(MAKE);
    let file = Tensors::read(&folder.path("in.safetensors"));
    let attend = "attend --input in.safetensors --output out.safetensors --sinks per-head \
                  --backward --dtype f64";
    let window = || Attention::new().causal(true).sliding_window(9, None).attention_sink_size(2);
    let cases = [
        (attend.to_owned(), Attention::new()),
        (format!("{attend} --causal --window 9,none --first-visible 2 --ranks 3"), window()),
        (
            format!("{attend} --chunk 8 --scale -0.3 --soft-cap 2 --ranks 4 --layout zigzag"),
            Attention::new().chunk_size(8).softmax_scale(-0.3).logits_soft_cap(2.0),
        ),
        (
            format!(
                "{attend} --soft-cap 1.5 --bias-order before --ranks 2 --layout striped --threads 2"
            ),
            Attention::new().logits_soft_cap(1.5).bias_order(BiasOrder::BeforeSoftCap),
        ),
        (
            format!("{attend} --causal --align bottom-right --ranks 5"),
            Attention::new().causal(true).align(annulus::Alignment::BottomRight),
        ),
        (
            format!("{attend} --dropout 0.3 --seed 77 --ranks 3 --layout contiguous"),
            Attention::new().dropout(0.3, 77),
        ),
        (
            format!("{attend} --unnormalized --prefix 7 --ranks 2"),
            Attention::new().unnormalized(true).prefix_len(7),
        ),
        (format!("{attend} --causal --ranks 40"), Attention::new().causal(true)),
    ];
    for (arguments, attention) in cases {
        let result = folder.succeed(&arguments);
        same(&Tensors::read(&folder.path("out.safetensors")), &expected(&file, &attention), 1e-10);
        assert!(
            result.out.contains("forward")
                && result.out.contains("backward")
                && result.out.contains("wrote out.safetensors"),
            "{result:?}"
        );
        assert_eq!(folder.names(), ["in.safetensors", "out.safetensors"]);
    }
}

#[test]
fn element_types_are_converted_on_reading() {
    let folder = Folder::new("attend_types");
    folder.succeed(MAKE);
    let want =
        expected(&Tensors::read(&folder.path("in.safetensors")), &Attention::new().causal(true));
    for (dtype, name, tolerance) in
        [("f32", "F32", 1e-4), ("bf16", "BF16", 0.15), ("f16", "F16", 0.05)]
    {
        let flags = format!("--causal --backward --sinks per-head --dtype {dtype} --ranks 3");
        folder.succeed(&format!("attend --input in.safetensors --output out.safetensors {flags}"));
        let got = Tensors::read(&folder.path("out.safetensors"));
        assert_eq!(format!("{:?}", got.all["out"].0), name);
        assert_eq!(format!("{:?}", got.all["lse"].0), "F32");
        if dtype != "f16" {
            same(&got, &want, tolerance);
        }
    }
}

#[test]
fn bytes_sent_equal_the_prediction_and_the_output_may_be_the_input() {
    let folder = Folder::new("attend_bytes");
    folder.succeed("make --output x.safetensors --q-len 64 --heads 2 --head-dim 8");
    let result = folder.succeed(
        "attend --input x.safetensors --output x.safetensors --causal --ranks 4 --layout zigzag \
         --trace traces",
    );
    // 3 hops of 3/4 of 64 rows, 2 tensors, 2 heads of dim 8, 4 bytes
    let bytes = 64 * 3 * 3 / 4 * 2 * 2 * 8 * 4;
    assert_eq!(bytes, 18 << 10);
    assert!(result.out.contains("sent 18.0 KiB (18 432 bytes) as predicted"), "{result:?}");
    assert_eq!(folder.names(), ["traces", "x.safetensors"]);
    assert!(Tensors::read(&folder.path("x.safetensors")).all.contains_key("out"));
    for rank in 0..4 {
        let trace = std::fs::read(folder.path(&format!("traces/rank-{rank}.json"))).unwrap();
        let trace: serde_json::Value = serde_json::from_slice(&trace).unwrap();
        assert!(
            trace["traceEvents"].as_array().unwrap().iter().any(|event| event["name"] == "forward")
        );
    }
}

#[test]
fn lengths_may_be_zero_and_unknown_tensors_are_noted() {
    let folder = Folder::new("attend_empty");
    Tensors::qkv([0, 2, 4], [5, 2, 4], 4)
        .f32("querry", &[1], |_| 0.0)
        .write(&folder.path("in.safetensors"));
    let result = folder.run("attend --input in.safetensors --output out.safetensors --ranks 2");
    assert_eq!(
        (result.code, result.err.as_str()),
        (0, "annulus: note: in.safetensors: not an input tensor, ignored: querry\n")
    );
    assert_eq!(Tensors::read(&folder.path("out.safetensors")).all["out"].1, [1, 0, 2, 4]);
    Tensors::qkv([3, 2, 4], [0, 2, 4], 4).write(&folder.path("in.safetensors"));
    folder.succeed("attend --input in.safetensors --output out.safetensors --ranks 2");
    let got = Tensors::read(&folder.path("out.safetensors"));
    assert!(got.numbers("out").iter().all(|&number| number == 0.0));
    assert!(got.numbers("lse").iter().all(|&number| number == f64::NEG_INFINITY));
}

#[test]
fn the_demo_verifies_itself() {
    let folder = Folder::new("demo");
    let result = folder.succeed("demo --len 300 --ranks 3 --dir kept");
    assert!(
        result.out.contains("verified 128 rows") && result.out.contains("3 ranks"),
        "{result:?}"
    );
    assert_eq!(folder.names(), ["kept"]);
    assert_eq!(
        Tensors::read(&folder.path("kept/output.safetensors")).all["out"].1,
        [1, 300, 8, 64]
    );
}
