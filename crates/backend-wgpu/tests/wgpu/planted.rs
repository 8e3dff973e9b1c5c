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
    /// As `Causal`, with dropout.
    Dropout,
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

const fn mistake(
    of: Of,
    what: &'static str,
    kernel: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mistake {
    Mistake { of, what, edit: KernelEdit { kernel, from, to }, is_race: false }
}

/// A barrier that is left out.
const fn no_barrier(
    of: Of,
    what: &'static str,
    kernel: &'static str,
    from: &'static str,
    to: &'static str,
) -> Mistake {
    Mistake { is_race: true, ..mistake(of, what, kernel, from, to) }
}

const FORWARD: &str = "forward";
const DQ: &str = "backward_queries";
const DKV: &str = "backward_keys";

/// Mistakes in what all levels share.
const SHARED: &[Mistake] = &[
    mistake(Of::Causal, "the sum is not rescaled", FORWARD, "sum = sum * rescale;", ""),
    mistake(
        Of::Causal,
        "one row of the accumulator is not rescaled",
        FORWARD,
        "o0_1 = o0_1 * rescale[1];",
        "",
    ),
    mistake(
        Of::Causal,
        "the mask of a row's last pair is that of the one before",
        FORWARD,
        "vec4<u32>(1u, 2u, 4u, 8u)) != vec4<u32>(0u)",
        "vec4<u32>(1u, 2u, 4u, 4u)) != vec4<u32>(0u)",
    ),
    mistake(
        Of::Causal,
        "the tile masks of all tiles are the first",
        FORWARD,
        "params.bits + 32u * mask_index + row",
        "params.bits + row",
    ),
    mistake(
        Of::Causal,
        "the head of keys and values",
        FORWARD,
        "let kv_head = (params.head_first + head) / params.group_heads;",
        "let kv_head = (params.head_first + head) % params.group_heads;",
    ),
    mistake(
        Of::Causal,
        "the last run of a list is left out",
        FORWARD,
        "for (var run = begin; run < end; run++) {",
        "for (var run = begin; run + 1u < end; run++) {",
    ),
    mistake(
        Of::Causal,
        "elements beyond the vector count",
        FORWARD,
        "if (c + 32u > params.head_dim) {",
        "if (c + 32u > params.head_dim + 32u) {",
    ),
    mistake(
        Of::Causal,
        "a row without an earlier key keeps its first maximum",
        FORWARD,
        "any_visible = any_visible | tile_visible;",
        "",
    ),
    mistake(
        Of::Epilogue,
        "the dropout of a query is that of the next",
        FORWARD,
        "return params.query_rows + 2u * min(q, params.queries - 1u);",
        "return params.query_rows + 2u * min(q + 1u, params.queries - 1u);",
    ),
    mistake(Of::Causal, "Δ is left out of dQ", DQ, "p * (dp - delta)", "p * dp"),
    mistake(
        Of::Causal,
        "dQ of earlier blocks is lost",
        DQ,
        "o0_1 = load_acc(",
        "o0_1 = 0.0 * load_acc(",
    ),
    mistake(
        Of::Causal,
        "dK and dV have the first query head of the group only",
        DKV,
        "query_head < head_end;",
        "query_head < head_begin + 1u;",
    ),
    mistake(
        Of::Causal,
        "dK without the scale of the scores",
        DKV,
        "var part = params.scale * dk0_0;",
        "var part = dk0_0;",
    ),
    mistake(
        Of::Causal,
        "statistics of the next query in dK and dV",
        DKV,
        "min(query + 2u, params.queries - 1u)",
        "min(query + 3u, params.queries - 1u)",
    ),
    mistake(
        Of::TwoPass,
        "dK and dV of earlier queries are lost",
        DKV,
        "if (params.add != 0u) { part = load_acc(",
        "if (params.add > 1u) { part = load_acc(",
    ),
    mistake(
        Of::Decode,
        "accumulators of all ranges of keys are the first",
        "decode",
        "+ range * params.acc_range;",
        ";",
    ),
    mistake(
        Of::Decode,
        "packed heads are the first",
        "decode",
        "return head + row % params.packed_heads;",
        "return head;",
    ),
    mistake(
        Of::Decode,
        "the last range is not merged",
        "merge_ranges",
        "params.ranges",
        "(params.ranges - 1u)",
    ),
    mistake(
        Of::Decode,
        "ranges are merged without their maxima",
        "merge_ranges",
        "let factor = factors[range];",
        "let factor = 1.0;",
    ),
];

/// Mistakes in score epilogues that are computed row by row.
const EPILOGUES: &[Mistake] = &[
    mistake(
        Of::Epilogue,
        "the bias is that of the next query",
        FORWARD,
        "bias_words[at + min(q, params.queries - 1u) * params.bias_row",
        "bias_words[at + min(q + 1u, params.queries - 1u) * params.bias_row",
    ),
    mistake(
        Of::Epilogue,
        "the bias is added to masked pairs, too, and their −∞ is not a mask",
        FORWARD,
        "visible = visible & is_not_negative_infinity(bias);",
        "",
    ),
    mistake(
        Of::Epilogue,
        "the slope of the soft cap is left out of dQ",
        DQ,
        "grad.ds * ds_dx",
        "grad.ds",
    ),
    mistake(
        Of::Epilogue,
        "dropout is left out of dV",
        DKV,
        "return ScoreGradients(p * fma(keep, dp, -delta), keep * p);",
        "return ScoreGradients(p * fma(keep, dp, -delta), p);",
    ),
];

/// Mistakes in products by multiply-adds, and in the exponential of f32 probabilities.
const MULTIPLY_ADD: &[Mistake] = &[
    mistake(Of::Causal, "the base of the exponential", FORWARD, "-0.693145751953125", "-0.69"),
    no_barrier(
        Of::Causal,
        "no barrier between a product and the next stores to workgroup memory",
        DKV,
        "workgroupBarrier();
        tile[slot + 0u] = left_0;",
        "tile[slot + 0u] = left_0;",
    ),
];

/// Mistakes in kernels that compute dV and dK one after the other.
const LARGE_DIMS: &[Mistake] = &[
    mistake(
        Of::LargeDims,
        "dV has the length of keys",
        DKV,
        "let acc_dim = select(params.head_dim, params.value_dim, is_dv);",
        "let acc_dim = params.head_dim;",
    ),
    mistake(
        Of::LargeDims,
        "dV has the scale of the scores",
        DKV,
        "let acc_factor = select(params.scale, 1.0, is_dv);",
        "let acc_factor = params.scale;",
    ),
    mistake(
        Of::LargeDims,
        "dK is that of probabilities",
        DKV,
        "select(grad.ds, grad.p_dropped, vec4<bool>(is_dv)), visible);",
        "grad.p_dropped, visible);",
    ),
    mistake(Of::LargeDims, "dP is left out of dK", DKV, "if (!is_dv) {", "if (false) {"),
];

/// Mistakes in products of register tiles of four rows.
const FOUR_ROWS: &[Mistake] = &[
    no_barrier(
        Of::Causal,
        "no barrier between stores to workgroup memory and the product",
        FORWARD,
        "tile[slot + 54u] = left_3;
        right[slot + 0u] = right_0;
        right[slot + 18u] = right_1;
        right[slot + 36u] = right_2;
        right[slot + 54u] = right_3;
        workgroupBarrier();",
        "tile[slot + 54u] = left_3;
        right[slot + 0u] = right_0;
        right[slot + 18u] = right_1;
        right[slot + 36u] = right_2;
        right[slot + 54u] = right_3;",
    ),
    mistake(
        Of::MaskedNan,
        "masked vectors are multiplied by 0",
        FORWARD,
        "select(vec4<f32>(0.0), b, ((words[3] >> j) & 1u) != 0u)",
        "b",
    ),
    mistake(
        Of::Causal,
        "one element of the scores is another's",
        DQ,
        "vec4<f32>(a2.z)",
        "vec4<f32>(a2.w)",
    ),
    mistake(
        Of::Causal,
        "a factor of P is stored in the column beside its own",
        DKV,
        "tile[9u * tx + ty + 144u]",
        "tile[9u * tx + ty + 72u]",
    ),
];

/// Mistakes in products of register tiles of two rows.
const TWO_ROWS: &[Mistake] = &[
    no_barrier(
        Of::Causal,
        "no barrier between stores to workgroup memory and the product",
        FORWARD,
        "tile[slot + 36u] = left_1;
        right[slot + 0u] = right_0;
        right[slot + 36u] = right_1;
        workgroupBarrier();",
        "tile[slot + 36u] = left_1;
        right[slot + 0u] = right_0;
        right[slot + 36u] = right_1;",
    ),
    mistake(
        Of::MaskedNan,
        "masked vectors are multiplied by 0",
        FORWARD,
        "select(vec4<f32>(0.0), b, ((words[1] >> j) & 1u) != 0u)",
        "b",
    ),
    mistake(
        Of::Causal,
        "the left rows of half of the invocations are those of the others",
        DQ,
        "((ty >> 1u) + 16u * (ty & 1u))",
        "(ty >> 1u)",
    ),
    mistake(
        Of::Causal,
        "the second row of P and dX is another's",
        DKV,
        "tile[9u * (2u * ty + 1u) + four]",
        "tile[9u * (2u * ty + 2u) + four]",
    ),
    mistake(
        Of::Causal,
        "masks of keys begin four rows apart",
        DKV,
        "atomicLoad(&visible_bits[j]) >> (2u * ty)",
        "atomicLoad(&visible_bits[j]) >> (4u * ty)",
    ),
    mistake(Of::Causal, "one vector in two is not loaded", DKV, "tile[slot + 36u] = left_1;", ""),
    mistake(Of::Causal, "row maxima of the other row", FORWARD, "own.xyxy;", "own.yxyx;"),
    mistake(
        Of::Dropout,
        "dropout of dK and dV has one key in two",
        DKV,
        "for (var n = 0u; n < 2u; n++) {",
        "for (var n = 0u; n < 1u; n++) {",
    ),
];

/// Mistakes in products of register tiles of one row, also those that stand in for two rows.
const ONE_ROW: &[Mistake] = &[
    mistake(
        Of::Causal,
        "the left rows of three quarters of the invocations are those of the others",
        DQ,
        "((ty >> 2u) + 8u * (ty & 3u))",
        "(ty >> 2u)",
    ),
    mistake(
        Of::Causal,
        "P and dX are those of the next row",
        DKV,
        "tile[9u * (1u * ty + 0u) + four]",
        "tile[9u * (1u * ty + 1u) + four]",
    ),
    mistake(
        Of::Causal,
        "masks of keys begin two rows apart",
        DKV,
        "atomicLoad(&visible_bits[j]) >> (1u * ty)",
        "atomicLoad(&visible_bits[j]) >> (2u * ty)",
    ),
    mistake(
        Of::Epilogue,
        "pairs that the bias masks are another row's",
        DQ,
        "atomicAnd(&visible_bits[1u * ty + 0u]",
        "atomicAnd(&visible_bits[(1u * ty + 1u) % 32u]",
    ),
    mistake(
        Of::Dropout,
        "dropout of dK and dV has no key",
        DKV,
        "for (var n = 0u; n < 1u; n++) {",
        "for (var n = 0u; n < 0u; n++) {",
    ),
];

/// Mistakes in reductions through workgroup memory.
const WORKGROUP: &[Mistake] = &[
    mistake(
        Of::Causal,
        "row maxima without the last invocation's",
        FORWARD,
        "for (var n = 0u; n < 8u; n++) {
        all = max(all,",
        "for (var n = 0u; n < 1u; n++) {
        all = max(all,",
    ),
    mistake(
        Of::Causal,
        "row sums without the last invocation's",
        FORWARD,
        "for (var n = 0u; n < 8u; n++) {
        all = all + tile[8u * ty + n]",
        "for (var n = 0u; n < 7u; n++) {
        all = all + tile[8u * ty + n]",
    ),
];

/// Mistakes in reductions by shuffles.
const SUBGROUP: &[Mistake] = &[
    mistake(
        Of::Causal,
        "row maxima of four invocations only",
        FORWARD,
        "return max(all, subgroupShuffleXor(all, 4u));",
        "return all;",
    ),
    mistake(
        Of::Causal,
        "row sums with another row's",
        FORWARD,
        "all = all + subgroupShuffleXor(all, 2u);",
        "all = all + subgroupShuffleXor(all, 4u);",
    ),
];

/// Mistakes in products on matrices, in the exponential of f16 probabilities, and in score
/// epilogues that are computed part by part.
const MATRIX: &[Mistake] = &[
    mistake(
        Of::Epilogue,
        "the bias is that of the next query",
        FORWARD,
        "return at + min(q, params.queries - 1u) * params.bias_row;",
        "return at + min(q + 1u, params.queries - 1u) * params.bias_row;",
    ),
    mistake(
        Of::Epilogue,
        "the bias of dK and dV is that of the next key",
        DKV,
        "bias_column(min(k + 2u, last))",
        "bias_column(min(k + 3u, last))",
    ),
    mistake(
        Of::Epilogue,
        "a bias of −∞ is not a mask",
        FORWARD,
        "four_bits(words[2] >> (4u * tx)) & is_not_negative_infinity(bias2)",
        "four_bits(words[2] >> (4u * tx))",
    ),
    mistake(
        Of::Epilogue,
        "the slope of the soft cap is left out of dQ",
        DQ,
        "d1 = d1 * slope1;",
        "",
    ),
    mistake(
        Of::Epilogue,
        "dropout and 1 / sum are left out of dV",
        DKV,
        "keep1 = keep1 * e;",
        "keep1 = e;",
    ),
    mistake(
        Of::Epilogue,
        "the rounds of dropout in dQ are those of the next query",
        DQ,
        "query_rounds2 = query_rounds(batch, head, row + 2u);",
        "query_rounds2 = query_rounds(batch, head, row + 3u);",
    ),
    mistake(
        Of::Dropout,
        "the rounds of dropout in dK and dV are those of the next query",
        DKV,
        "shared_rounds[lane] = query_rounds(batch, head, column + lane);",
        "shared_rounds[lane] = query_rounds(batch, head, column + lane + 1u);",
    ),
    mistake(Of::Causal, "the base of the exponential", FORWARD, "1.4426950408889634", "1.4"),
    // products by multiply-adds test the mask themselves
    mistake(
        Of::Causal,
        "dQ attends to masked pairs",
        DQ,
        "s1 = select(vec4<f32>(0.0), grad.ds, visible);",
        "s1 = grad.ds;",
    ),
    no_barrier(
        Of::Causal,
        "no barrier between stores of keys and their product",
        FORWARD,
        "right_half[stored_at + 240u] = right_3;
        workgroupBarrier();",
        "right_half[stored_at + 240u] = right_3;",
    ),
    no_barrier(
        Of::Causal,
        "no barrier between stores of values and their product",
        FORWARD,
        "right_half[at][n >> 2u] = 0.0h;
            }
        }
    }
    workgroupBarrier();",
        "right_half[at][n >> 2u] = 0.0h;
            }
        }
    }",
    ),
    mistake(
        Of::Causal,
        "each step of a product loads the first elements",
        FORWARD,
        "&right_half[10u * (matrix_column + 0u) + k]",
        "&right_half[10u * (matrix_column + 0u)]",
    ),
    mistake(
        Of::Causal,
        "a matrix of the product is stored over another",
        DKV,
        "let matrix_product = 10u * matrix_row + matrix_column / 4u;",
        "let matrix_product = 10u * matrix_row;",
    ),
    mistake(
        Of::Epilogue,
        "the factor of probabilities is not undone",
        FORWARD,
        "vec4<f32>(params.keep_scale / PROB_SCALE)",
        "vec4<f32>(1.0 / PROB_SCALE)",
    ),
    mistake(
        Of::Causal,
        "the exponent of the factors of score gradients",
        DQ,
        "vec4<u32>(268u) - exponents",
        "vec4<u32>(267u) - exponents",
    ),
    mistake(
        Of::Causal,
        "invocations of a row scale its score gradients differently",
        DKV,
        "largest_gradients = max(largest_gradients, subgroupShuffleXor(largest_gradients, 4u));",
        "",
    ),
    mistake(
        Of::VisibleNan,
        "the last elements are not tested for NaN",
        FORWARD,
        "(sums.x + sums.y) + (sums.z + sums.w)",
        "(sums.x + sums.x) + (sums.x + sums.x)",
    ),
    mistake(
        Of::MaskedNan,
        "NaN is multiplied in matrices",
        FORWARD,
        "right_half[at][n >> 2u] = 0.0h;",
        "",
    ),
    mistake(
        Of::VisibleNan,
        "NaN is replaced by 0 for queries that attend to it",
        FORWARD,
        "if (atomicLoad(&non_finite[0]) != 0u) {",
        "if (atomicLoad(&non_finite[0]) > 1u) {",
    ),
];

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
            Self::Dropout => {
                spec.dropout = Some(Dropout { probability: 0.3, seed: 7 });
                (case(spec, causal), Setting::ALONE)
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
fn mistakes_planted_in_register_tiles_of_one_row_are_caught() {
    let Some(adapter) = adapter() else { return };
    let kernels = Kernels { register_tile: RegisterTile::OneRow, ..PLAIN };
    catch(&adapter, kernels, &[MULTIPLY_ADD, ONE_ROW, WORKGROUP]);
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
