//! Mistakes planted in the kernels, one at a time: a case must give a wrong answer for each, or the
//! tests would not find such a mistake.
//!
//! A mistake is a change of a kernel's text. A change whose text no longer occurs, or whose kernel
//! does not compile, is a failure, too. Only the changed kernel is compiled again.
//!
//! Without a barrier a kernel has a data race, of which a right answer may be the outcome: a GPU
//! with subgroups of 64 invocations runs a workgroup in step. Such an answer is accepted on
//! adapters that are GPUs. On software adapters the races that are planted give wrong answers.

use std::{collections::HashMap, fmt::Write};

use annulus::{Dims, Layout, Spec};
use annulus_conformance::{Answer, Case, Draw, Judge, Masks, Setting, Subject, wgpu::WgpuRing};
use annulus_core::{BackwardMode, DType, Dropout};
use annulus_wgpu::{Adapter, Gpu, KernelEdit, Level, RegisterTile};
use ndarray::s;

use super::{adapter, gpu_with};

/// Cases, by the code that they execute. Dims are no multiples of 32, and queries have
/// several tiles of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Of {
    /// Full and partial tiles without a score epilogue.
    Causal,
    /// As `Causal`, with NaN in keys and values that no query attends to.
    MaskedNan,
    /// As `Causal`, with a NaN in a value that queries attend to.
    VisibleNan,
    /// Bias, soft cap and dropout.
    Epilogue,
    /// As `Causal`, with dK and dV computed where the keys are, block by block of queries.
    TwoPass,
    /// As `Causal`, of dims so large that a kernel computes dV and dK one after the other.
    LargeDims,
    /// One query, whose heads are packed, and several ranges of keys.
    Decode,
}

/// A planted mistake.
struct Mistake {
    of: Of,
    what: &'static str,
    edit: KernelEdit,
    /// True if the answer depends on the order in which a device runs invocations.
    is_race: bool,
}

/// Lists mistakes: perhaps that it is a race, the case, the kernel and what is wrong; then the text
/// and the text in its place.
macro_rules! mistakes {
    (@of race $of:ident $kernel:ident, $what:literal, $from:literal, $to:literal) => {
        Mistake { is_race: true, ..mistakes!(@of $of $kernel, $what, $from, $to) }
    };
    (@of $of:ident $kernel:ident, $what:literal, $from:literal, $to:literal) => {
        Mistake {
            of: Of::$of,
            what: $what,
            edit: KernelEdit { kernel: $kernel, from: $from, to: $to },
            is_race: false,
        }
    };
    ($($($word:ident)+: $what:literal => $from:literal => $to:literal;)*) => {
        &[$(mistakes!(@of $($word)+, $what, $from, $to)),*]
    };
}

const FORWARD: &str = "forward";
const DQ: &str = "backward_queries";
const DKV: &str = "backward_keys";
const MERGE: &str = "merge_ranges";

/// Mistakes in what all levels share.
const SHARED: &[Mistake] = mistakes! {
    Causal FORWARD: "one row of the accumulator is not rescaled" =>
        "o0_1 = o0_1 * rescale[1];" => "";
    Causal FORWARD: "the mask of a row's last pair is that of the one before" =>
        "vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u)" =>
            "vec4<u32>(1u, 2u, 4u, 4u)) != vec4<u32>(0u)";
    Causal FORWARD: "elements beyond the vector count" =>
        "if (c + 32u > params.head_dim) {" => "if (c + 32u > params.head_dim + 32u) {";
    Causal FORWARD: "a row without an earlier key keeps its first maximum" =>
        "any_visible = any_visible | tile_visible;" => "";
    Epilogue FORWARD: "the dropout of a query is that of the next" =>
        "return params.query_rows + 2u * min(q, params.queries - 1u);" =>
            "return params.query_rows + 2u * min(q + 1u, params.queries - 1u);";
    Causal DKV: "statistics of the next query in dK and dV" =>
        "min(query + 2u, params.queries - 1u)" => "min(query + 3u, params.queries - 1u)";
    TwoPass DKV: "dK and dV of earlier queries are lost" =>
        "if (params.add != 0u) { part = load_acc(" => "if (params.add > 1u) { part = load_acc(";
    Decode MERGE: "the last range is not merged" =>
        "params.ranges" => "(params.ranges - 1u)";
};

/// Mistakes in score epilogues that are computed row by row.
const EPILOGUES: &[Mistake] = mistakes! {
    Epilogue FORWARD: "the bias is that of the next query" =>
        "bias_words[at + min(q, params.queries - 1u) * params.bias_row" =>
            "bias_words[at + min(q + 1u, params.queries - 1u) * params.bias_row";
    Epilogue FORWARD: "the bias is added to masked pairs, too, and their −∞ is not a mask" =>
        "visible = visible & is_not_negative_infinity(bias);" => "";
};

/// Mistakes in products by multiply-adds, and in the exponential of f32 probabilities.
const MULTIPLY_ADD: &[Mistake] = mistakes! {
    Causal FORWARD: "the base of the exponential" =>
        "-0.693145751953125" => "-0.69";
    race Causal DKV: "no barrier between a product and the next stores to workgroup memory" =>
        "workgroupBarrier();
        tile[slot + 0u] = left_0;" => "tile[slot + 0u] = left_0;";
};

/// Mistakes in kernels that compute dV and dK one after the other.
const LARGE_DIMS: &[Mistake] = mistakes! {
    LargeDims DKV: "dV has the length of keys" =>
        "let acc_dim = select(params.head_dim, params.value_dim, is_dv);" =>
            "let acc_dim = params.head_dim;";
};

/// Mistakes in products of register tiles of four rows.
const FOUR_ROWS: &[Mistake] = mistakes! {
    race Causal FORWARD: "no barrier between stores to workgroup memory and the product" =>
        "tile[slot + 54u] = left_3;
        right[slot + 0u] = right_0;
        right[slot + 18u] = right_1;
        right[slot + 36u] = right_2;
        right[slot + 54u] = right_3;
        workgroupBarrier();" =>
            "tile[slot + 54u] = left_3;
        right[slot + 0u] = right_0;
        right[slot + 18u] = right_1;
        right[slot + 36u] = right_2;
        right[slot + 54u] = right_3;";
    MaskedNan FORWARD: "masked vectors are multiplied by 0" =>
        "select(vec4<f32>(0.0), b, ((words[3] >> j) & 1u) != 0u)" => "b";
};

/// Mistakes in products of register tiles of two rows.
const TWO_ROWS: &[Mistake] = mistakes! {
    race Causal FORWARD: "no barrier between stores to workgroup memory and the product" =>
        "tile[slot + 36u] = left_1;
        right[slot + 0u] = right_0;
        right[slot + 36u] = right_1;
        workgroupBarrier();" =>
            "tile[slot + 36u] = left_1;
        right[slot + 0u] = right_0;
        right[slot + 36u] = right_1;";
    MaskedNan FORWARD: "masked vectors are multiplied by 0" =>
        "select(vec4<f32>(0.0), b, ((words[1] >> j) & 1u) != 0u)" => "b";
    Causal FORWARD: "row maxima of the other row" =>
        "own.xyxy;" => "own.yxyx;";
};

/// Mistakes in reductions through workgroup memory.
const WORKGROUP: &[Mistake] = mistakes! {
    Causal FORWARD: "row maxima without the last invocation's" =>
        "for (var n = 0u; n < 8u; n++) {
        all = max(all," =>
            "for (var n = 0u; n < 1u; n++) {
        all = max(all,";
};

/// Mistakes in reductions by shuffles.
const SUBGROUP: &[Mistake] = mistakes! {
    Causal FORWARD: "row maxima of four invocations only" =>
        "return max(all, subgroupShuffleXor(all, 4u));" => "return all;";
};

/// Mistakes in products on matrices, in the exponential of f16 probabilities, and in score
/// epilogues that are computed part by part.
const MATRIX: &[Mistake] = mistakes! {
    Epilogue FORWARD: "the bias is that of the next query" =>
        "return at + min(q, params.queries - 1u) * params.bias_row;" =>
            "return at + min(q + 1u, params.queries - 1u) * params.bias_row;";
    Epilogue FORWARD: "a bias of −∞ is not a mask" =>
        "four_bits(words[2] >> (4u * tx)) & is_not_negative_infinity(bias2)" =>
            "four_bits(words[2] >> (4u * tx))";
    Causal FORWARD: "the base of the exponential" =>
        "1.4426950408889634" => "1.4";
    race Causal FORWARD: "no barrier between stores of keys and their product" =>
        "right_half[stored_at + 240u] = right_3;
        workgroupBarrier();" => "right_half[stored_at + 240u] = right_3;";
    race Causal FORWARD: "no barrier between stores of values and their product" =>
        "right_half[at][n >> 2u] = 0.0h;
            }
        }
    }
    workgroupBarrier();" =>
            "right_half[at][n >> 2u] = 0.0h;
            }
        }
    }";
    Causal DQ: "the exponent of the factors of score gradients" =>
        "vec4<u32>(268u) - exponents" => "vec4<u32>(267u) - exponents";
    Causal DKV: "invocations of a row scale its score gradients differently" =>
        "largest_gradients = max(largest_gradients, subgroupShuffleXor(largest_gradients, 4u));" =>
            "";
    VisibleNan FORWARD: "the last elements are not tested for NaN" =>
        "(sums.x + sums.y) + (sums.z + sums.w)" => "(sums.x + sums.x) + (sums.x + sums.x)";
    MaskedNan FORWARD: "NaN is multiplied in matrices" =>
        "right_half[at][n >> 2u] = 0.0h;" => "";
    VisibleNan FORWARD: "NaN is replaced by 0 for queries that attend to it" =>
        "if (atomicLoad(&non_finite[0]) != 0u) {" => "if (atomicLoad(&non_finite[0]) > 1u) {";
};

impl Of {
    fn case(self) -> (Case, Setting) {
        // so many queries that no heads are packed
        let dims = Dims {
            q_len: 150,
            kv_len: 150,
            q_heads: 4,
            kv_heads: 2,
            head_dim: 36,
            value_dim: 28,
            ..Dims::new(1, 1, 1, 1)
        };
        let mut spec = Spec::new(dims, DType::F64);
        let causal = Masks { causal: true, ..Masks::default() };
        let ring = Setting::new(3, Layout::Contiguous);
        let case = |spec, masks| Case::new(format!("{self:?}"), spec, masks, &mut Draw::new(11));
        match self {
            Self::Causal => (case(spec, causal), ring),
            Self::MaskedNan => {
                // the last keys are after every query
                spec.dims.q_len = 140;
                let mut case = case(spec, causal);
                case.k.slice_mut(s![.., 145, .., ..]).fill(f64::NAN);
                case.v.slice_mut(s![.., 145, .., ..]).fill(f64::NAN);
                (case, Setting::ALONE)
            }
            Self::VisibleNan => {
                let mut case = case(spec, causal);
                case.v[[0, 40, 0, 3]] = f64::NAN;
                (case, ring)
            }
            Self::Epilogue => {
                spec.bias = Some([1, 4, 150, 150]);
                spec.soft_cap = Some(2.0);
                spec.dropout = Some(Dropout { probability: 0.3, seed: 7 });
                let mut case = case(spec, causal);
                // a query that the bias alone masks
                let bias = case.bias.as_mut().expect("a bias");
                bias.slice_mut(s![.., .., 50, ..]).fill(f64::NEG_INFINITY);
                (case, Setting::ALONE)
            }
            Self::LargeDims => {
                spec.dims = Dims { q_len: 40, kv_len: 70, head_dim: 132, value_dim: 140, ..dims };
                (case(spec, causal), Setting::ALONE)
            }
            Self::TwoPass => {
                spec.backward = BackwardMode::TwoPass;
                (case(spec, causal), ring)
            }
            Self::Decode => {
                spec.dims = Dims { q_len: 1, kv_len: 2300, q_heads: 8, kv_heads: 1, ..dims };
                let all = Masks::default();
                (case(spec, all), Setting::ALONE)
            }
        }
    }
}

/// Requires that the cases are right with these kernels, and wrong with each of the mistakes.
fn catch(adapter: &Adapter, kernels: Kernels, lists: &[&[Mistake]]) {
    let Kernels { level, register_tile, dtype } = kernels;
    let Some(gpu) = gpu_with(level, Some(register_tile)) else { return };
    let mut cases = HashMap::new();
    let mut uncaught = String::new();
    for Mistake { of, what, edit, is_race } in lists.iter().copied().flatten() {
        let (case, setting, judge) = cases.entry(*of).or_insert_with(|| {
            let (case, setting) = of.case();
            let case = case.in_dtype(dtype);
            let judge = Judge::new(&case).expect("a truth");
            let answer = run(&gpu, &case, &setting).expect("an answer");
            judge.check(&answer).unwrap_or_else(|wrong| panic!("{}: {wrong}", case.name));
            (case, setting, judge)
        });
        let edited = gpu.edited(*edit).expect("the same device");
        let name = format!("{} {}, {}: {what}", level.name(), register_tile.name(), edit.kernel);
        match run(&edited, case, setting).map(|answer| judge.check(&answer)) {
            Ok(Err(_)) => {}
            Ok(Ok(())) if *is_race && !adapter.software => {}
            Ok(Ok(())) => writeln!(uncaught, "{name}: the answer is right").expect("a string"),
            Err(error) => writeln!(uncaught, "{name}: {error}").expect("a string"),
        }
    }
    assert!(uncaught.is_empty(), "{uncaught}");
}

fn run(gpu: &Gpu, case: &Case, setting: &Setting) -> annulus::Result<Answer> {
    WgpuRing::new(gpu.clone()).run(case, setting, 1).map(|mut answers| answers.remove(0))
}

/// Kernels in which mistakes are planted.
#[derive(Clone, Copy)]
struct Kernels {
    level: Level,
    register_tile: RegisterTile,
    dtype: DType,
}

const PLAIN: Kernels =
    Kernels { level: Level::Plain, register_tile: RegisterTile::FourRows, dtype: DType::F32 };

#[test]
fn planted_mistakes_are_caught() {
    let Some(adapter) = adapter() else { return };
    let lists = [SHARED, LARGE_DIMS, EPILOGUES, MULTIPLY_ADD, FOUR_ROWS, WORKGROUP];
    catch(&adapter, PLAIN, &lists);
}

#[test]
fn mistakes_planted_in_register_tiles_of_two_rows_are_caught() {
    let Some(adapter) = adapter() else { return };
    let kernels = Kernels { register_tile: RegisterTile::TwoRows, ..PLAIN };
    catch(&adapter, kernels, &[MULTIPLY_ADD, TWO_ROWS, WORKGROUP]);
}

#[test]
fn the_matrix_level_catches_planted_mistakes() {
    let Some(adapter) = adapter() else { return };
    // without: `the_matrix_level_holds_if_the_adapter_has_it`
    if adapter.levels.contains(&Level::Matrix) {
        let of_f32 = Kernels { level: Level::Matrix, ..PLAIN };
        catch(&adapter, Kernels { dtype: DType::F16, ..of_f32 }, &[SHARED, SUBGROUP, MATRIX]);
        // without matrices only forward, which has reductions, differs from level plain
        catch(&adapter, of_f32, &[SUBGROUP]);
    }
}
