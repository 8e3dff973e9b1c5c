//! Programs of C, compiled with `cc` against the shared library and `annulus.h`.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![cfg(target_os = "linux")]

mod common;

use std::{fs, path::Path};

use annulus::{
    Attention, CacheShape, Dims, Division, LocalCache, LocalRing, Runtime, Tensors,
    ndarray::{Array3, Array4, s},
};
use common::{PassInputs, Workspace, run, value};

const DIMS: Dims =
    Dims { batch: 2, q_len: 37, kv_len: 37, q_heads: 4, kv_heads: 2, head_dim: 8, value_dim: 6 };

fn source(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/c").join(name)
}

/// Results of the facade, as bytes in the order of `results` in `case.h`.
fn by_rust(ranks: usize) -> Vec<u8> {
    let Dims { batch, q_len, q_heads, .. } = DIMS;
    let inputs = PassInputs::<f32>::all(DIMS);
    let dlse = Array3::from_shape_fn((batch, q_heads, q_len), |(b, head, row)| {
        value(5, [b, row, head, 0])
    });
    let attention = Attention::new().causal(true);
    let new = |attention| {
        let setup = (attention, Division::new(), Runtime::new().threads(1));
        LocalRing::new(setup, DIMS, ranks).unwrap()
    };
    let mut ring = new(attention.clone());
    let (tensors, dout) = (inputs.tensors(), inputs.dout.view());
    let forward = ring.forward(&tensors).unwrap();
    let gradients = ring.backward(&tensors, &forward, dout, Some(dlse.view())).unwrap();
    let all = forward.out.iter().chain(&forward.lse);
    let all = all.chain(&gradients.dq).chain(&gradients.dk).chain(&gradients.dv);

    let of = |salt: usize, of: &Array4<f32>| {
        Array4::from_shape_fn(of.dim(), |(b, row, head, c)| value(salt, [b, row, head, c]))
    };
    let direction = [of(6, &inputs.q), of(7, &inputs.k), of(8, &inputs.v)];
    let [q, k, v] = direction.each_ref().map(|tensor| tensor.view());
    let direction = Tensors::new(q, k, v);
    let mut ring = new(attention.second_derivatives(true));
    let jvp = ring.jvp(&tensors, &direction, None).unwrap();
    let double = ring.double_backward(&tensors, dout, Some(dlse.view()), &direction, None).unwrap();
    let all = all.chain(&jvp.out).chain(&jvp.lse);
    let all = all.chain(&double.inputs.dq).chain(&double.inputs.dk).chain(&double.inputs.dv);
    let all = all.chain(&jvp.out_tangent).chain(&jvp.lse_tangent);
    let all = all.chain(&double.ddout).chain(&double.ddlse);
    all.flat_map(|number| number.to_ne_bytes()).collect()
}

#[test]
fn a_causal_ring_gives_the_bits_of_rust() {
    let workspace = Workspace::new("threads");
    let program = workspace.compile(&source("threads.c"));
    for ranks in [1, 2, 3, 7] {
        let file = workspace.path("results");
        run(workspace.command(&program).arg(ranks.to_string()).arg(&file));
        let second = workspace.path("results.second");
        let results = [file, second].map(|file| fs::read(file).unwrap()).concat();
        assert!(results == by_rust(ranks), "{ranks} ranks");
    }
}

/// Results of decoding by the facade, as bytes in the order of `decoded` in `case.h`.
fn decoded_by_rust(ranks: usize) -> Vec<u8> {
    let Dims { batch, q_len, q_heads, kv_heads, head_dim, value_dim, .. } = DIMS;
    let PassInputs { q, k, v, .. } = PassInputs::<f32>::all(DIMS);
    let shape = CacheShape::new(batch, q_heads, head_dim).kv_heads(kv_heads).value_dim(value_dim);
    let (attention, runtime) = (Attention::new().causal(true), Runtime::new().threads(1));
    let mut cache = LocalCache::new(&attention, &runtime, shape.page_rows(4), ranks).unwrap();
    let mut out = Array4::<f32>::zeros((batch, q_len, q_heads, value_dim));
    let mut lse = Array3::<f32>::zeros((batch, q_heads, q_len));
    let tokens = (24..q_len).map(|row| row..row + 1);
    for rows in [0..20, 20..24].into_iter().chain(tokens) {
        let of = |x: &Array4<f32>| x.slice(s![.., rows.clone(), .., ..]).to_owned();
        cache.append(of(&k).view(), of(&v).view()).unwrap();
        let forward = cache.attend(of(&q).view(), None).unwrap();
        out.slice_mut(s![.., rows.clone(), .., ..]).assign(&forward.out);
        lse.slice_mut(s![.., .., rows]).assign(&forward.lse);
    }
    out.iter().chain(&lse).flat_map(|number| number.to_ne_bytes()).collect()
}

#[test]
fn decoding_gives_the_bits_of_rust() {
    let workspace = Workspace::new("cache");
    let program = workspace.compile(&source("threads.c"));
    let machine = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/machine.json");
    for ranks in [1, 2, 3, 7] {
        let file = workspace.path("results");
        run(workspace.command(&program).arg(ranks.to_string()).arg(&file).arg(&machine));
        assert!(fs::read(&file).unwrap() == decoded_by_rust(ranks), "{ranks} ranks");
    }
}

#[test]
fn events_of_steps_add_up_to_the_prediction() {
    let workspace = Workspace::new("steps");
    run(&mut workspace.command(&workspace.compile(&source("threads.c"))));
}

#[test]
fn arguments_without_meaning_give_a_status_and_a_message() {
    let workspace = Workspace::new("bad");
    run(&mut workspace.command(&workspace.compile(&source("bad.c"))));
}

#[test]
fn a_forked_child_computes_and_refuses_handles_of_its_parent() {
    let workspace = Workspace::new("fork");
    run(&mut workspace.command(&workspace.compile(&source("fork.c"))));
}
