//! Trains a small decoder on candle: RoPE, grouped-query attention, a sliding window in every
//! second layer, RMSNorm, SwiGLU, AdamW. The ranks of MPI share one sequence, and **the checkpoint
//! does not depend on their number**, bit for bit.
//!
//! ```sh
//! cargo build --release --features mpi,link-mpi --example train
//! mpirun -n 4 target/release/examples/train --steps 10 --save 10.safetensors
//! mpirun -n 3 target/release/examples/train --resume 10.safetensors --save 20.safetensors
//! ```
//!
//! Why the bits are equal: a rank has whole **leaves**, 256 consecutive rows of the sequence.
//!
//! * Attention sums in the reproducible order of annulus, by leaves.
//! * Everything else has a batch axis of leaves, `[leaves, 256, …]`, and a copy of the weights for
//!   each leaf. candle then multiplies matrices of 256 rows, however many leaves a rank has (with
//!   weights of stride 0 it would stack the leaves into one matrix), and the gradient of a copy is
//!   the sum over the rows of its leaf.
//! * An all-gather brings the gradients of all leaves, which every rank sums by one binary tree.
use annulus_candle::{
    Options,
    annulus::{self, Attention, Division, Layout, planning::LEAF_ROWS},
    attention,
};
use candle_core::{D, Device, Error, Result, Tensor, Var, safetensors};
use std::collections::{BTreeMap, HashMap};

const LEAF: usize = LEAF_ROWS as usize;
const VOCABULARY: usize = 64;
const LAYERS: usize = 4;
const WIDTH: usize = 64;
const HIDDEN: usize = 128;
const HEADS: usize = 4;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 16;
const WINDOW: u64 = 300;

/// Tensors by name: `weight.`, `mean.` and `square.` of each shape, and `step`.
type Checkpoint = HashMap<String, Tensor>;
/// Collects the bytes of every rank on every rank.
type Gather = dyn FnMut(&[u8]) -> annulus::Result<Vec<Vec<u8>>>;

fn main() -> Result<()> {
    #[cfg(feature = "mpi")]
    let _launch = annulus::comm::mpi::Launch::begin().map_err(Error::wrap)?; // ends MPI at the end
    train(&std::env::args().skip(1).collect::<Vec<String>>())
}

/// Trains as the arguments say. Without MPI, `--local-ranks` are threads of this process.
pub(crate) fn train(arguments: &[String]) -> Result<()> {
    let value = |name: &str| arguments.iter().skip_while(|&word| word != name).nth(1);
    let number = |name: &str, default: usize| {
        value(name).map_or(Ok(default), |text| text.parse().map_err(Error::wrap))
    };
    let [steps, leaves] = [number("--steps", 20)?, number("--leaves", 12)?];
    let mut ranks = Ranks::new(leaves, number("--local-ranks", 1)?)?;
    let mut model = match value("--resume") {
        Some(path) => safetensors::load(path, &Device::Cpu)?,
        None => new_model()?,
    };
    for step in model["step"].to_scalar::<i64>()? as usize..steps {
        let start = std::time::Instant::now();
        let tokens = corpus(step, leaves * LEAF + 1);
        let mut sum = ranks.sum(&gradients(&model, &ranks, &tokens)?)?;
        let loss = sum.pop().unwrap_or(f32::NAN) / (leaves * LEAF) as f32;
        update(&mut model, step + 1, &sum, 1.0 / (leaves * LEAF) as f64)?;
        if ranks.rank == 0 {
            println!("step {:3}  loss {loss:.6}  {:.2?}", step + 1, start.elapsed());
        }
    }
    match value("--save") {
        Some(path) if ranks.rank == 0 => safetensors::save(&model, path),
        _ => Ok(()),
    }
}

/// Returns `len` tokens: phrases of 8 to 39 tokens from a dictionary of 48, drawn for the step.
fn corpus(step: usize, len: usize) -> Vec<u32> {
    let phrase = |number: u64| {
        let mut random = Random(number);
        let len = 8 + random.below(32);
        (0..len).map(|_| random.below(VOCABULARY as u64) as u32).collect::<Vec<u32>>()
    };
    let mut random = Random(1_000_000 + step as u64);
    std::iter::repeat_with(|| phrase(random.below(48))).flatten().take(len).collect()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(x ^ (x >> 31)) * u128::from(bound)) >> 64) as u64
    }
}

/// The rows of this rank, and how it attends and sums with the others.
struct Ranks {
    rank: usize,
    /// Numbers of this rank's leaves in the whole sequence, in the order of its tensors.
    leaves: Vec<usize>,
    /// Layers with a window, and without.
    options: [Options; 2],
    gather: Box<Gather>,
}

impl Ranks {
    fn new(leaves: usize, local_ranks: usize) -> Result<Self> {
        let causal = Attention::new().causal(true).reproducible(true);
        let division = Division::new().layout(Layout::Zigzag);
        let options = [causal.clone().sliding_window(WINDOW - 1, 0), causal.clone()]
            .map(|attention| Options::new(attention).division(division.clone()));
        #[cfg(feature = "mpi")]
        if annulus::comm::mpi::is_alive() {
            use annulus::comm::{self, Control};
            let mut ring = comm::mpi::Mpi::world(Default::default()).map_err(Error::wrap)?;
            let rows = leaves * LEAF;
            let dims = annulus::Dims::new(1, rows, HEADS, HEAD_DIM).kv_heads(KV_HEADS);
            let rank = ring.rank();
            let own = division.rank_rows(&causal, dims, ring.ranks(), rank).map_err(Error::wrap)?;
            let [windowed, global] = options.map(|all| all.over_mpi(rows, rows, &ring));
            let mut round = 0;
            return Ok(Self {
                rank,
                leaves: own.q.iter().step_by(LEAF).map(|row| row as usize / LEAF).collect(),
                options: [windowed?, global?],
                gather: Box::new(move |bytes| {
                    round += 1;
                    comm::all_gather::<comm::Host>(&mut ring, round, bytes)
                }),
            });
        }
        Ok(Self {
            rank: 0,
            leaves: (0..leaves).collect(),
            options: options.map(|all| all.ranks(local_ranks)),
            gather: Box::new(|bytes| Ok(vec![bytes.to_vec()])),
        })
    }

    /// Sums the vectors of the leaves of all ranks; `own` has those of this rank.
    fn sum(&mut self, own: &[Vec<f32>]) -> Result<Vec<f32>> {
        let record = |(&leaf, sums): (&usize, &Vec<f32>)| {
            let bits: Vec<u32> = sums.iter().map(|x| x.to_bits()).collect();
            std::iter::once(leaf as u32).chain(bits).flat_map(u32::to_le_bytes)
        };
        let bytes: Vec<u8> = self.leaves.iter().zip(own).flat_map(record).collect();
        let len = shapes().iter().map(|(_, rows, columns)| rows * columns).sum::<usize>() + 1;
        let mut leaves = BTreeMap::new();
        for bytes in (self.gather)(&bytes).map_err(Error::wrap)? {
            for record in bytes.chunks_exact((1 + len) * 4) {
                let (leaf, sums) = record.as_chunks().0.split_at(1);
                let sums = sums.iter().map(|&word| f32::from_le_bytes(word)).collect::<Vec<f32>>();
                leaves.insert(u32::from_le_bytes(leaf[0]), sums);
            }
        }
        let mut level: Vec<Vec<f32>> = leaves.into_values().collect();
        while level.len() > 1 {
            let sum = |pair: &[Vec<f32>]| match pair {
                [left, right] => left.iter().zip(right).map(|(l, r)| l + r).collect(),
                alone => alone[0].clone(),
            };
            level = level.chunks(2).map(sum).collect();
        }
        level.pop().ok_or_else(|| Error::msg("--leaves: got 0, want at least 1"))
    }
}

/// Names and shapes of the weights, in the order of the vectors of gradients.
fn shapes() -> Vec<(String, usize, usize)> {
    let mut all = vec![("embedding".into(), VOCABULARY, WIDTH)];
    for layer in 0..LAYERS {
        let of_layer = [
            ("norm", 1, WIDTH),
            ("qkv", WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
            ("o", HEADS * HEAD_DIM, WIDTH),
            ("norm2", 1, WIDTH),
            ("up", WIDTH, 2 * HIDDEN),
            ("down", HIDDEN, WIDTH),
        ];
        all.extend(of_layer.map(|(name, m, n)| (format!("{layer}.{name}"), m, n)));
    }
    all.extend([("norm".into(), 1, WIDTH), ("head".into(), WIDTH, VOCABULARY)]);
    all
}

/// Makes the checkpoint of step 0: weights, and the two moments of AdamW.
fn new_model() -> Result<Checkpoint> {
    let mut random = Random(0);
    let mut model = HashMap::from([("step".into(), Tensor::new(0i64, &Device::Cpu)?)]);
    for (name, rows, columns) in shapes() {
        // norms start as 1, matrices with variance 1/rows
        let bound = (3.0 / rows as f32).sqrt();
        let mut draw = || (random.below(1 << 24) as f32 / (1 << 23) as f32 - 1.0) * bound;
        let start = (0..rows * columns).map(|_| if rows == 1 { 1.0 } else { draw() }).collect();
        let weight = Tensor::from_vec(start, (rows, columns), &Device::Cpu)?;
        model.insert(format!("mean.{name}"), weight.zeros_like()?);
        model.insert(format!("square.{name}"), weight.zeros_like()?);
        model.insert(format!("weight.{name}"), weight);
    }
    Ok(model)
}

/// Makes a step of AdamW with the gradients `sum` · `scale`.
fn update(model: &mut Checkpoint, step: usize, mut sum: &[f32], scale: f64) -> Result<()> {
    let [rate, decay, beta1, beta2] = [3e-3, 0.01, 0.9, 0.95f64];
    let [scale1, scale2] = [beta1, beta2].map(|beta| 1.0 / (1.0 - beta.powi(step as i32)));
    for (name, rows, columns) in shapes() {
        let own = sum.split_off(..rows * columns).unwrap_or_default();
        let gradient = (Tensor::from_slice(own, (rows, columns), &Device::Cpu)? * scale)?;
        let names = ["weight", "mean", "square"].map(|kind| format!("{kind}.{name}"));
        let [weight, mean, square] = names.each_ref().map(|name| &model[name]);
        let mean = ((mean * beta1)? + (&gradient * (1.0 - beta1))?)?;
        let square = ((square * beta2)? + (gradient.sqr()? * (1.0 - beta2))?)?;
        let change = ((&mean * scale1)? / ((&square * scale2)?.sqrt()? + 1e-8)?)?;
        let weight = ((weight * (1.0 - rate * decay))? - (change * rate)?)?;
        model.extend(names.into_iter().zip([weight, mean, square]));
    }
    model.insert("step".into(), Tensor::new(step as i64, &Device::Cpu)?);
    Ok(())
}

/// Returns, for each leaf of this rank, the gradients of all weights and the loss: sums over the
/// rows of the leaf.
fn gradients(model: &Checkpoint, ranks: &Ranks, tokens: &[u32]) -> Result<Vec<Vec<f32>>> {
    let leaves = ranks.leaves.len();
    let mut weights = HashMap::new();
    for (name, rows, columns) in shapes() {
        let copies = model[&format!("weight.{name}")].expand((leaves, rows, columns))?;
        weights.insert(name, Var::from_tensor(&copies)?);
    }
    let losses = losses(&weights, ranks, tokens)?;
    let mut gradients = losses.sum_all()?.backward()?;
    let mut sums = vec![Vec::new(); leaves];
    for (name, ..) in shapes() {
        let missing = || Error::msg(format!("{name} has no gradient"));
        let gradient = gradients.remove(&weights[&name]).ok_or_else(missing)?;
        let of_leaves = gradient.flatten_from(1)?.to_vec2::<f32>()?;
        sums.iter_mut().zip(of_leaves).for_each(|(sum, gradient)| sum.extend(gradient));
    }
    sums.iter_mut().zip(losses.to_vec1()?).for_each(|(sum, loss)| sum.push(loss));
    Ok(sums)
}

/// Computes the loss of each leaf of this rank.
fn losses(weights: &HashMap<String, Var>, ranks: &Ranks, tokens: &[u32]) -> Result<Tensor> {
    let leaves = ranks.leaves.len();
    let rows = || ranks.leaves.iter().flat_map(|leaf| leaf * LEAF..(leaf + 1) * LEAF);
    let weight = |name: &str| weights[name].as_tensor();
    let one_hot = |token: u32| (0..VOCABULARY as u32).map(move |id| f32::from(id == token));
    let inputs: Vec<f32> = rows().flat_map(|row| one_hot(tokens[row])).collect();
    let inputs = Tensor::from_vec(inputs, (leaves, LEAF, VOCABULARY), &Device::Cpu)?;
    let targets: Vec<u32> = rows().map(|row| tokens[row + 1]).collect();
    let targets = Tensor::from_vec(targets, (leaves, LEAF, 1), &Device::Cpu)?;
    let rotation = rotation(rows())?;
    let norm = |x: &Tensor, weight: &Tensor| {
        let scale = (x.sqr()?.mean_keepdim(D::Minus1)? + 1e-6)?.sqrt()?.recip()?;
        x.broadcast_mul(&scale)?.broadcast_mul(weight)
    };
    let mut x = inputs.matmul(weight("embedding"))?;
    for layer in 0..LAYERS {
        let weight = |name: &str| weight(&format!("{layer}.{name}"));
        let h = norm(&x, weight("norm"))?;
        let qkv = h.matmul(weight("qkv"))?;
        let qkv = qkv.reshape((1, leaves * LEAF, HEADS + 2 * KV_HEADS, HEAD_DIM))?;
        let q = rotate(&qkv.narrow(2, 0, HEADS)?, &rotation)?;
        let k = rotate(&qkv.narrow(2, HEADS, KV_HEADS)?, &rotation)?;
        let v = qkv.narrow(2, HEADS + KV_HEADS, KV_HEADS)?;
        let a = attention(&q, &k, &v, &ranks.options[layer % 2])?;
        x = (x + a.reshape((leaves, LEAF, HEADS * HEAD_DIM))?.matmul(weight("o"))?)?;
        let up = norm(&x, weight("norm2"))?.matmul(weight("up"))?;
        let gated = (up.narrow(2, 0, HIDDEN)?.silu()? * up.narrow(2, HIDDEN, HIDDEN)?)?;
        x = (x + gated.matmul(weight("down"))?)?;
    }
    let scores = norm(&x, weight("norm"))?.matmul(weight("head"))?;
    candle_nn::ops::log_softmax(&scores, D::Minus1)?.gather(&targets, D::Minus1)?.neg()?.sum((1, 2))
}

/// Returns cosines and sines of RoPE for global rows: `[1, rows, 1, dim/2]`.
fn rotation(rows: impl Iterator<Item = usize>) -> Result<[Tensor; 2]> {
    let frequency = |pair: usize| 1e4f64.powf(-(pair as f64) / (HEAD_DIM / 2) as f64);
    let angles: Vec<f64> = rows
        .flat_map(|row| (0..HEAD_DIM / 2).map(move |pair| row as f64 * frequency(pair)))
        .collect();
    let tensor = |function: fn(f64) -> f64| {
        let values: Vec<f32> = angles.iter().map(|&angle| function(angle) as f32).collect();
        Tensor::from_vec(values, (1, angles.len() * 2 / HEAD_DIM, 1, HEAD_DIM / 2), &Device::Cpu)
    };
    Ok([tensor(f64::cos)?, tensor(f64::sin)?])
}

/// Rotates the pairs (c, c + dim/2) of `x`.
fn rotate(x: &Tensor, [cos, sin]: &[Tensor; 2]) -> Result<Tensor> {
    let [a, b] = [x.narrow(3, 0, HEAD_DIM / 2)?, x.narrow(3, HEAD_DIM / 2, HEAD_DIM / 2)?];
    let first = (a.broadcast_mul(cos)? - b.broadcast_mul(sin)?)?;
    let second = (a.broadcast_mul(sin)? + b.broadcast_mul(cos)?)?;
    Tensor::cat(&[first, second], 3)
}
