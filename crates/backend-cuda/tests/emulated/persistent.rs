//! Tile scheduler and outputs of the forward pass on warpgroups: tiles are computed once whatever
//! the number of blocks, packed heads keep their bits, and outputs leave by TMA where it can write
//! them.

use std::{sync::Arc, time::Duration};

use annulus::{Attention, Setup, comm::ring::Ring};
use annulus_comm::{Deadline, Staged, threads};
use annulus_conformance::{Answer, Case, Draw, Judge, Masks, Setting, Subject};
use annulus_core::{Alibi, Alignment, DType, Dims, Dropout, Error, Inputs, Outputs, Result, Spec};
use annulus_cuda::{
    Cuda,
    device::{CudaCopier, CudaSpace, CudaTensor, CudaViewMut},
};
use annulus_cuda_emulator as emulator;
use ndarray::{Array4, Axis};

use crate::{
    common::{DEADLINE, staged},
    mistakes::Planted,
    support::{hopper_on, next_device},
};

fn text(error: Error) -> String {
    error.to_string()
}

/// Forward kernel on warpgroups: perhaps a planted mistake, and the most blocks of a launch.
#[derive(Clone, Copy)]
pub(crate) struct Launch {
    planted: Option<Planted>,
    blocks: usize,
}

impl Launch {
    const fn of_blocks(blocks: usize) -> Self {
        Self { planted: None, blocks }
    }

    /// One block, which computes all tiles.
    pub(crate) const fn alone(planted: Option<Planted>) -> Self {
        Self { planted, blocks: 1 }
    }
}

/// Warpgroups of one emulated device.
fn with_launch(ordinal: usize, launch: Launch) -> impl Subject {
    let Launch { planted, blocks } = launch;
    staged("one emulated gpu", Duration::ZERO, move || {
        Ok(hopper_on(ordinal, planted, 0)?.with_forward_blocks(blocks))
    })
}

/// Two passes of one plan; blocks of the forward kernel.
fn passes(case: &Case, launch: Launch) -> Result<(Vec<Answer>, u64), String> {
    let ordinal = next_device();
    let answers = with_launch(ordinal, launch).run(case, &Setting::ALONE, 2).map_err(text)?;
    Ok((answers, emulator::blocks(ordinal, "forward_warpgroup")))
}

/// Judges both passes.
pub(crate) fn verdict(case: &Case, launch: Launch) -> Result<u64, String> {
    let (answers, launched) = passes(case, launch)?;
    let judge = Judge::new(case).map_err(text)?;
    answers.iter().try_for_each(|answer| judge.check(answer))?;
    Ok(launched)
}

fn case(name: &str, dims: Dims, masks: Masks, change: impl FnOnce(&mut Spec)) -> Case {
    let mut spec = Spec::new(dims, DType::F64);
    change(&mut spec);
    Case::new(name, spec, masks, &mut Draw::new(11)).in_dtype(DType::Bf16)
}

/// Tiles of 192 queries with 2, 3 and 4 tiles of keys, for each of two heads that share none.
pub(crate) fn stairs() -> Case {
    let dims = Dims::new(1, 450, 2, 16);
    case("stairs", dims, Masks { causal: true, ..Masks::default() }, |_| ())
}

/// Full tiles only.
pub(crate) fn full() -> Case {
    let dims = Dims { q_len: 250, ..Dims::new(1, 300, 1, 16) };
    case("full tiles", dims, Masks::default(), |_| ())
}

/// Queries of which the first four tiles attend to nothing, and the last to one tile of keys.
pub(crate) fn mostly_empty() -> Case {
    let dims = Dims { q_len: 900, kv_len: 60, ..Dims::new(1, 60, 1, 16) };
    let masks = Masks { causal: true, ..Masks::default() };
    case("empty tiles", dims, masks, |spec| spec.alignment = Alignment::BottomRight)
}

/// 40 queries of four heads of one KV head: packed, they fill 160 of the 192 rows of a tile.
pub(crate) fn packed(dtype: DType) -> Case {
    let dims = Dims { batch: 2, q_len: 40, kv_len: 150, q_heads: 4, kv_heads: 1, ..stairs_dims() };
    let masks = Masks { causal: true, first_visible: 2, ..Masks::default() };
    let mut spec = Spec::new(dims, DType::F64);
    spec.alignment = Alignment::BottomRight;
    Case::new("packed heads", spec, masks, &mut Draw::new(12)).in_dtype(dtype)
}

const fn stairs_dims() -> Dims {
    Dims { batch: 1, q_len: 300, kv_len: 300, q_heads: 2, kv_heads: 2, head_dim: 24, value_dim: 40 }
}

#[test]
fn every_tile_is_computed_once_by_any_number_of_blocks() {
    for (case, tiles) in [(stairs(), 6), (mostly_empty(), 5)] {
        let (want, launched) = passes(&case, Launch::of_blocks(usize::MAX)).unwrap();
        assert_eq!(launched, 2 * tiles, "{}", case.name);
        Judge::new(&case).unwrap().check(&want[0]).unwrap();
        for blocks in [1, 2, 4] {
            let (got, launched) = passes(&case, Launch::of_blocks(blocks)).unwrap();
            assert_eq!(launched, 2 * blocks as u64);
            for answer in &got {
                answer.same_bits(&want[0]).unwrap();
            }
        }
    }
}

#[test]
fn packed_heads_hold_on_warpgroups() {
    for (dtype, blocks, tiles) in [(DType::Bf16, usize::MAX, 2), (DType::F16, 1, 1)] {
        assert_eq!(verdict(&packed(dtype), Launch::of_blocks(blocks)), Ok(2 * tiles));
    }
    // groups of three leave two rows of a tile over
    let dims = Dims { q_len: 45, kv_len: 70, q_heads: 3, kv_heads: 1, ..stairs_dims() };
    let masks = Masks { causal: true, ..Masks::default() };
    verdict(&case("three heads", dims, masks, |_| ()), Launch::of_blocks(2)).unwrap();
}

#[test]
fn score_options_are_those_of_each_packed_head() {
    let dims = Dims { q_len: 20, kv_len: 140, q_heads: 8, kv_heads: 2, ..stairs_dims() };
    let masks = Masks { causal: true, window: Some([Some(90), None]), ..Masks::default() };
    let mut all = case("every option", dims, masks, |spec| {
        spec.alignment = Alignment::BottomRight;
        spec.bias = Some([1, 8, 20, 140]);
        spec.bias_function = Some(Arc::new(Alibi::published(8)));
        spec.dropout = Some(Dropout { probability: 0.3, seed: 77 });
        spec.soft_cap = Some(5.0);
    });
    all.draw_tensors(&mut Draw::new(13));
    // a bias of −∞ masks the pair, for one head only
    all.bias.iter_mut().flatten().step_by(17).for_each(|bias| *bias = f64::NEG_INFINITY);
    verdict(&all.in_dtype(DType::Bf16), Launch::of_blocks(1)).unwrap();
}

#[test]
fn packing_changes_no_bit_on_warpgroups() {
    let shared = packed(DType::Bf16);
    let (want, _) = passes(&shared, Launch::of_blocks(2)).unwrap();
    // each query head gets its own copy of keys and values
    let mut apart = shared.clone();
    apart.spec.dims.kv_heads = 4;
    let repeated = |tensor: &Array4<f64>| tensor.select(Axis(2), &[0, 0, 0, 0]);
    (apart.k, apart.v) = (repeated(&shared.k), repeated(&shared.v));
    let (got, _) = passes(&apart, Launch::of_blocks(2)).unwrap();
    assert!(got[0].out == want[0].out && got[0].lse == want[0].lse && got[0].dq == want[0].dq);
}

/// Bytes of a tensor whose rows, but the first and the last, are `out`, and whose heads begin
/// `apart` elements from each other.
fn out_with(apart: usize, value_dim: usize) -> Result<Vec<u8>> {
    const ROWS: usize = 200;
    const HEADS: usize = 2;
    let cuda: Cuda = hopper_on(next_device(), None, 0)?;
    let setup = Setup::from(Attention::new().causal(true).dtype(DType::Bf16));
    let copier = CudaCopier::new(cuda.stream().device())?;
    let staged = Staged::<_, CudaSpace>::new(threads::ring(1).remove(0), copier);
    let dims = Dims { value_dim, ..Dims::new(1, ROWS, HEADS, 16) };
    let mut ring = Ring::new(
        cuda.clone(),
        Box::new(Deadline::new(staged, DEADLINE)?),
        setup.spec(dims),
        setup.ring_options(),
    )?;
    let tensor = |salt: usize, dim: usize| {
        let number = |index: usize| half::bf16::from_f32((index * 7 + salt) as f32 % 23.0 * 0.1);
        let bytes: Vec<u8> =
            (0..ROWS * HEADS * dim).flat_map(|index| number(index).to_ne_bytes()).collect();
        CudaTensor::upload(cuda.stream(), &bytes, DType::Bf16, [1, ROWS, HEADS, dim])
    };
    let [q, k, v] = [tensor(1, 16)?, tensor(2, 16)?, tensor(3, value_dim)?];
    let shape = [1, ROWS + 2, HEADS, apart];
    let bytes = vec![0x5a; 2 * (ROWS + 2) * HEADS * apart];
    let mut out = CudaTensor::upload(cuda.stream(), &bytes, DType::Bf16, shape)?;
    let mut lse = CudaTensor::uninitialized(cuda.stream(), DType::F32, [1, HEADS, ROWS, 1])?;
    let row = (HEADS * apart) as i64;
    let first = out.view_mut().address() + 2 * row.unsigned_abs();
    // SAFETY: rows 1 … ROWS of the tensor, of which the first `value_dim` elements of each head.
    let view = unsafe {
        let strides = [0, row, apart as i64, 1];
        CudaViewMut::from_raw(first, DType::Bf16, [1, ROWS, HEADS, value_dim], strides)
    };
    let inputs = Inputs { q: q.view(), k: k.view(), v: v.view(), bias: None, sinks: None };
    let mut outputs = Outputs {
        out: view,
        lse: lse.view_mut(),
        max: None,
        sum: None,
        ties: None,
        out_residual: None,
    };
    ring.forward(&inputs, &mut outputs)?;
    cuda.stream().synchronize(DEADLINE)?;
    out.download()
}

#[test]
fn outputs_are_written_by_tma_or_threads_and_nothing_beside_them() {
    const HEADS: usize = 2;
    for value_dim in [16, 72] {
        // contiguous; heads at multiples of 16 bytes; heads that TMA cannot address
        let all = [value_dim, value_dim + 8, value_dim + 4].map(|apart| {
            let bytes = out_with(apart, value_dim).unwrap();
            let mut elements = Vec::new();
            for (row, heads) in bytes.chunks_exact(2 * HEADS * apart).enumerate() {
                for head in heads.chunks_exact(2 * apart) {
                    let (own, beside) = head.split_at(2 * value_dim);
                    let is_outside = row == 0 || row == 201;
                    assert!(beside.iter().all(|&byte| byte == 0x5a), "{apart}: row {row}");
                    assert!(!is_outside || own.iter().all(|&byte| byte == 0x5a), "{apart}: {row}");
                    elements.extend(own.to_vec());
                }
            }
            elements
        });
        assert!(all[0] == all[1] && all[0] == all[2], "{value_dim}");
    }
}
