//! Outputs and gradients beside attention written with candle's own operators in f64, over random
//! configurations; errors; graphs.

use annulus_candle::{
    Options,
    annulus::{Attention, Dims, Division, Layout, Plan, comm::threads},
    attention,
};
use candle_core::{D, DType, Device, Result, Tensor, Var};

const CPU: Device = Device::Cpu;

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((u128::from(x ^ (x >> 31)) * bound as u128) >> 64) as usize
    }

    fn coin(&mut self) -> bool {
        self.below(2) == 1
    }

    /// Draws a tensor of eighths from −2 to 2, which every element type represents.
    fn tensor(&mut self, shape: &[usize], dtype: DType) -> Result<Tensor> {
        let len = shape.iter().product();
        let values: Vec<f64> = (0..len).map(|_| self.below(33) as f64 / 8.0 - 2.0).collect();
        Tensor::from_vec(values, shape, &CPU)?.to_dtype(dtype)
    }
}

/// The configuration of one call.
#[derive(Debug)]
struct Case {
    ranks: usize,
    dims: Dims,
    causal: bool,
    window: Option<(usize, usize)>,
    scale: Option<f64>,
    soft_cap: Option<f64>,
    segments: usize,
    bias: Option<[usize; 4]>,
    sinks: Option<[usize; 2]>,
    seed: u64,
}

impl Case {
    fn random(seed: u64) -> Self {
        let mut random = Random(seed);
        let kv_heads = 1 + random.below(3);
        let q_heads = kv_heads * (1 + random.below(3));
        let q_len = 1 + random.below(150);
        let kv_len = if random.coin() { q_len } else { 1 + random.below(150) };
        let (batch, head_dim, value_dim) =
            (1 + random.below(2), 1 + random.below(70), 1 + random.below(40));
        let dims = Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim };
        let mut one_or = |len| if random.coin() { 1 } else { len };
        let bias = [one_or(batch), one_or(q_heads), one_or(q_len), one_or(kv_len)];
        let sinks = [one_or(q_heads), 1 + random.below(3)];
        Self {
            ranks: 1 + random.below(4),
            dims,
            causal: random.coin(),
            window: random.coin().then(|| (random.below(60), random.below(60))),
            scale: random.coin().then(|| 0.05 + random.below(10) as f64 / 20.0),
            soft_cap: random.coin().then(|| 1.0 + random.below(5) as f64),
            segments: if random.coin() { 1 + random.below(4) } else { 0 },
            bias: random.coin().then_some(bias),
            sinks: random.coin().then_some(sinks),
            seed,
        }
    }

    fn attention(&self) -> Attention {
        let side = |side: Option<usize>| side.map(|side| side as u64);
        Attention::new()
            .causal(self.causal)
            .sliding_window(side(self.window.map(|w| w.0)), side(self.window.map(|w| w.1)))
            .softmax_scale(self.scale)
            .logits_soft_cap(self.soft_cap)
    }

    /// Returns the segments of queries and keys; the last quarter is padding.
    fn ids(&self) -> Option<[Tensor; 2]> {
        let ids = |len: usize| {
            let ids = (0..self.dims.batch).flat_map(|_| 0..len).map(|row| {
                let segment = (row * self.segments / len) as i64;
                if self.segments > 1 && row * 4 >= len * 3 { -1 } else { segment }
            });
            Tensor::from_vec(ids.collect(), (self.dims.batch, len), &CPU).expect("ids of every row")
        };
        (self.segments > 0).then(|| [ids(self.dims.q_len), ids(self.dims.kv_len)])
    }

    /// Returns 1 for visible pairs, else 0: `[batch, 1, q_len, kv_len]`, f64.
    fn mask(&self) -> Result<Tensor> {
        let Dims { batch, q_len, kv_len, .. } = self.dims;
        let ids = self.ids().map(|ids| ids.map(|ids| ids.to_vec2::<i64>().expect("integers")));
        let mut mask = Vec::new();
        for b in 0..batch {
            for i in 0..q_len {
                for j in 0..kv_len {
                    let visible = (!self.causal || j <= i)
                        && self.window.is_none_or(|(l, r)| j + l >= i && j <= i + r)
                        && ids.as_ref().is_none_or(|[q, k]| q[b][i] >= 0 && q[b][i] == k[b][j]);
                    mask.push(f64::from(visible));
                }
            }
        }
        Tensor::from_vec(mask, (batch, 1, q_len, kv_len), &CPU)
    }
}

/// The leaves of a case: q, k, v in some strides, bias, sinks.
struct Leaves {
    vars: Vec<Var>,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Option<Tensor>,
    sinks: Option<Tensor>,
}

impl Leaves {
    /// Draws the tensors of a case; the same values for every `dtype`.
    fn new(case: &Case, dtype: DType) -> Result<Self> {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = case.dims;
        let mut random = Random(case.seed ^ 0xabcd);
        let mut vars = Vec::new();
        let mut tensor = |len: usize, heads: usize, dim: usize| {
            let form = random.below(4);
            let shape = match form {
                0 => [batch, len, heads, dim],
                1 => [batch, heads, len, dim],
                2 => [batch, len, heads + 2, dim + 3],
                _ => [1, len, heads, dim],
            };
            let var = Var::from_tensor(&random.tensor(&shape, dtype)?)?;
            vars.push(var.clone());
            match form {
                0 => Ok(var.as_tensor().clone()),
                1 => var.transpose(1, 2),
                2 => var.narrow(2, 1, heads)?.narrow(3, 2, dim),
                _ => var.expand((batch, len, heads, dim)),
            }
        };
        let q = tensor(q_len, q_heads, head_dim)?;
        let k = tensor(kv_len, kv_heads, head_dim)?;
        let v = tensor(kv_len, kv_heads, value_dim)?;
        let wide = if dtype == DType::F64 { DType::F64 } else { DType::F32 };
        let mut further = |shape: Option<&[usize]>| {
            let Some(shape) = shape else { return Ok(None) };
            let var = Var::from_tensor(&random.tensor(shape, wide)?)?;
            vars.push(var.clone());
            Ok::<_, candle_core::Error>(Some(var.as_tensor().clone()))
        };
        let bias = further(case.bias.as_ref().map(|shape| &shape[..]))?;
        let sinks = further(case.sinks.as_ref().map(|shape| &shape[..]))?;
        Ok(Self { vars, q, k, v, bias, sinks })
    }

    /// Returns out and the gradients of all leaves, in f64.
    fn results(&self, out: &Tensor) -> Result<Vec<Tensor>> {
        let weights = Random(7).tensor(out.dims(), DType::F64)?;
        let loss = (out.to_dtype(DType::F64)? * weights)?.sum_all()?;
        let gradients = loss.backward()?;
        let gradients = self.vars.iter().map(|var| {
            let gradient = gradients.get(var).ok_or(candle_core::Error::msg("no gradient"))?;
            gradient.to_dtype(DType::F64)
        });
        std::iter::once(out.to_dtype(DType::F64)).chain(gradients).collect()
    }
}

/// Attention as candle's users write it, in f64: repeated heads, a matrix of scores, softmax.
fn candle_attention(case: &Case, leaves: &Leaves) -> Result<Tensor> {
    let Dims { batch, kv_len, q_heads, kv_heads, head_dim, .. } = case.dims;
    let repeat = |x: &Tensor| {
        let (dim, group) = (x.dim(3)?, q_heads / kv_heads);
        let x = x.unsqueeze(3)?.expand((batch, kv_len, kv_heads, group, dim))?;
        x.reshape((batch, kv_len, q_heads, dim))?.transpose(1, 2)?.contiguous()
    };
    let q = leaves.q.transpose(1, 2)?.contiguous()?;
    let (k, v) = (repeat(&leaves.k)?, repeat(&leaves.v)?);
    let scale = case.scale.unwrap_or(1.0 / (head_dim as f64).sqrt());
    let mut scores = (q.matmul(&k.t()?.contiguous()?)? * scale)?;
    if let Some(cap) = case.soft_cap {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    if let Some(bias) = &leaves.bias {
        scores = scores.broadcast_add(bias)?;
    }
    // scores and sinks are below 100, so that e^x needs no maximum
    let e = scores.exp()?.broadcast_mul(&case.mask()?)?;
    let mut sum = e.sum_keepdim(D::Minus1)?;
    if let Some(sinks) = &leaves.sinks {
        let sinks = sinks.exp()?.sum_keepdim(1)?; // [heads|1, 1]
        sum = sum.broadcast_add(&sinks.reshape((1, sinks.dim(0)?, 1, 1))?)?;
    }
    // a row without a visible key is 0
    let sum = (&sum + sum.eq(0.0)?.to_dtype(DType::F64)?)?;
    e.broadcast_div(&sum)?.matmul(&v)?.transpose(1, 2)
}

fn largest(x: &Tensor) -> Result<f64> {
    x.abs()?.flatten_all()?.max(0)?.to_scalar()
}

/// Largest error of `got`, relative to the largest element of `scale`, or to 1.
fn error(got: &Tensor, want: &Tensor, scale: &Tensor) -> Result<f64> {
    assert_eq!(got.dims(), want.dims());
    let difference = largest(&(got - want)?)?;
    assert!(!difference.is_nan());
    Ok(difference / largest(scale)?.max(1.0))
}

/// Sums `x` over the axes that are 1 in `shape`.
fn summed(x: &Tensor, shape: &[usize]) -> Result<Tensor> {
    let axes: Vec<usize> = (0..4).filter(|&axis| shape[axis] == 1).collect();
    x.sum_keepdim(axes)
}

/// Compares `count` random cases of a type. Returns the largest error.
fn compare(dtype: DType, count: u64, bound: f64) -> Result<()> {
    let mut most: f64 = 0.0;
    for seed in 0..count {
        let case = Case::random(seed);
        let leaves = Leaves::new(&case, dtype)?;
        let mut options = Options::new(case.attention())
            .ranks(case.ranks)
            .bias(leaves.bias.clone())
            .sinks(leaves.sinks.clone());
        if let Some([q, kv]) = case.ids() {
            options = options.segment_ids(&q, &kv)?;
        }
        let got = leaves.results(&attention(&leaves.q, &leaves.k, &leaves.v, &options)?)?;
        let mut wide = Leaves::new(&case, DType::F64)?;
        if let Some(bias) = &mut wide.bias {
            // a bias of every pair: its gradients may cancel in the sums of the shared bias
            let Dims { batch, q_heads, q_len, kv_len, .. } = case.dims;
            let pairs = bias.broadcast_as((batch, q_heads, q_len, kv_len))?;
            wide.vars[3] = Var::from_tensor(&pairs.detach())?;
            *bias = wide.vars[3].as_tensor().clone();
        }
        let want = wide.results(&candle_attention(&case, &wide)?)?;
        assert_eq!(got.len(), want.len());
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            let error = match case.bias {
                Some(shape) if index == 4 => {
                    error(got, &summed(want, &shape)?, &summed(&want.abs()?, &shape)?)?
                }
                _ => error(got, want, want)?,
            };
            assert!(error <= bound, "tensor {index}: {error:e} > {bound:e} in {case:?}");
            most = most.max(error);
        }
    }
    println!("{dtype:?}: largest error {most:e} of {bound:e}");
    Ok(())
}

#[test]
fn f64_equals_candle() -> Result<()> {
    compare(DType::F64, 60, 16.0 * f64::EPSILON)
}

#[test]
fn f32_equals_candle() -> Result<()> {
    compare(DType::F32, 60, 16.0 * f64::from(f32::EPSILON))
}

#[test]
fn bf16_equals_candle() -> Result<()> {
    // one rounding of the result, and for expanded tensors candle's sums of rounded gradients
    compare(DType::BF16, 60, 2f64.powi(-7))
}

#[test]
fn f16_equals_candle() -> Result<()> {
    compare(DType::F16, 60, 2f64.powi(-10))
}

#[test]
fn sinks_alone_have_a_gradient() -> Result<()> {
    let x = Random(1).tensor(&[1, 20, 4, 8], DType::F32)?;
    let sinks = Var::from_tensor(&Random(2).tensor(&[4, 1], DType::F32)?)?;
    let bias = Random(3).tensor(&[1, 4, 20, 20], DType::F32)?;
    let options = Options::new(Attention::new()).sinks(sinks.as_tensor().clone()).bias(bias);
    let gradients = attention(&x, &x, &x, &options)?.sum_all()?.backward()?;
    let gradient = gradients.get(&sinks).unwrap().to_vec2::<f32>()?;
    assert!(gradient.iter().flatten().all(|&x| x != 0.0), "{gradient:?}");
    Ok(())
}

#[test]
fn one_tensor_as_q_k_and_v_gets_the_sum_of_three_gradients() -> Result<()> {
    let x = Var::from_tensor(&Random(1).tensor(&[1, 20, 2, 8], DType::F64)?)?;
    let options = Options::new(Attention::new().causal(true));
    let whole = attention(&x, &x, &x, &options)?.sqr()?.sum_all()?.backward()?;
    let parts = [x.copy()?, x.copy()?, x.copy()?].map(|x| Var::from_tensor(&x.detach()).unwrap());
    let out = attention(&parts[0], &parts[1], &parts[2], &options)?;
    let gradients = out.sqr()?.sum_all()?.backward()?;
    let [q, k, v] = parts.each_ref().map(|part| gradients.get(part).unwrap().clone());
    assert!(largest(&(whole.get(&x).unwrap() - ((q + k)? + v)?)?)? < 1e-14);
    Ok(())
}

#[test]
fn a_graph_has_several_backward_passes() -> Result<()> {
    let x = Var::from_tensor(&Random(1).tensor(&[1, 20, 2, 8], DType::F64)?)?;
    let y = attention(&x, &(&*x * 2.0)?, &x, &Options::new(Attention::new()))?;
    let [once, twice] = [y.sum_all()?, (y.sum_all()? * 2.0)?];
    let gradient = |loss: &Tensor| Ok::<_, candle_core::Error>(loss.backward()?.get(&x).cloned());
    let [a, b, c] = [gradient(&once)?, gradient(&twice)?, gradient(&once)?].map(Option::unwrap);
    assert!(largest(&((&a * 2.0)? - &b)?)? == 0.0);
    assert!(largest(&(&a - &c)?)? == 0.0);
    Ok(())
}

#[test]
fn each_call_has_the_segments_of_its_own_in_the_backward_pass() -> Result<()> {
    let x = Var::from_tensor(&Random(1).tensor(&[1, 30, 2, 8], DType::F64)?)?;
    let options = Options::new(Attention::new());
    let ids = |first: i64| {
        Tensor::from_vec((0..30).map(|i| i64::from(i >= first)).collect(), (1, 30), &CPU)
    };
    let split = |at| options.clone().segment_ids(&ids(at)?, None);
    let [a, b] = [split(10)?, split(20)?];
    let loss = |options: &Options| attention(&x, &x, &x, options)?.sqr()?.sum_all();
    let both = (loss(&a)? + loss(&b)?)?.backward()?;
    let sum =
        [&a, &b].map(|options| loss(options).unwrap().backward().unwrap().get(&x).unwrap().clone());
    assert!(largest(&(both.get(&x).unwrap() - (&sum[0] + &sum[1])?)?)? < 1e-14);
    Ok(())
}

#[test]
fn ranks_over_a_transport_equal_one_rank_bit_for_bit() -> Result<()> {
    let (rows, ranks) = (1024, 3);
    let dims = Dims::new(1, rows, 4, 16).kv_heads(2);
    let whole = Attention::new().causal(true).reproducible(true);
    let division = Division::new().layout(Layout::Zigzag);
    let [q, k, v] = [4, 2, 2]
        .map(|heads| Random(heads).tensor(&[1, rows, heads as usize, 16], DType::F32).unwrap());
    let sinks = Random(5).tensor(&[4, 1], DType::F32)?;
    let run = |options: &Options, rows: Option<&Tensor>| -> Result<Vec<Vec<f32>>> {
        let own = |x: &Tensor| match rows {
            Some(rows) => x.index_select(rows, 1),
            None => Ok(x.clone()),
        };
        let mut vars = Vec::new();
        for x in [own(&q)?, own(&k)?, own(&v)?, sinks.clone()] {
            vars.push(Var::from_tensor(&x)?);
        }
        let options = options.clone().sinks(vars[3].as_tensor().clone());
        let out = attention(&vars[0], &vars[1], &vars[2], &options)?;
        let gradients = out.sqr()?.sum_all()?.backward()?;
        let all = std::iter::once(Ok(&out)).chain(
            vars.iter().map(|var| gradients.get(var).ok_or(candle_core::Error::msg("no gradient"))),
        );
        all.map(|x| x?.flatten_all()?.to_vec1()).collect()
    };
    let want = run(&Options::new(whole.clone()), None)?;
    let endpoints =
        threads::ring(ranks).into_iter().map(|endpoint| std::sync::Mutex::new(Some(endpoint)));
    let parts = threads::each_rank(endpoints, |rank, endpoint| {
        let own = division.rank_rows(&whole, dims, ranks, rank)?.q;
        let own: Vec<u32> = own.iter().map(|row| row as u32).collect();
        let rows_of = Tensor::from_slice(&own, own.len(), &CPU).unwrap();
        let options = Options::new(whole.clone()).division(division.clone());
        let options = options.over(rows, rows, move |setup, dims| {
            let endpoint = endpoint.lock().unwrap().take();
            Plan::new(setup, dims, endpoint.expect("one plan"))
        });
        Ok((own, run(&options, Some(&rows_of)).unwrap()))
    })
    .map_err(candle_core::Error::wrap)?;
    for (own, results) in parts {
        for (tensor, (got, want)) in results.iter().zip(&want).enumerate() {
            let row = got.len() / own.len();
            if tensor == 4 {
                assert_eq!(got, want, "dsinks is the sum over all ranks");
                continue;
            }
            for (got, &at) in got.chunks(row).zip(&own) {
                assert_eq!(got, &want[at as usize * row..][..row], "tensor {tensor}, row {at}");
            }
        }
    }
    Ok(())
}

#[test]
fn a_derivative_of_a_gradient_is_an_error() -> Result<()> {
    let draw = |seed| Var::from_tensor(&Random(seed).tensor(&[1, 9, 2, 4], DType::F64)?);
    let [q, k, v] = [draw(1)?, draw(2)?, draw(3)?];
    let bias = Var::from_tensor(&Random(4).tensor(&[1, 2, 9, 9], DType::F64)?)?;
    let options = Options::new(Attention::new()).bias(bias.as_tensor().clone());
    let gradients = attention(&q, &k, &v, &options)?.sqr()?.sum_all()?.backward()?;
    for var in [&q, &k, &v, &bias] {
        let second = gradients.get(var).unwrap().sqr()?.sum_all()?.backward();
        let error = second.map(drop).unwrap_err().to_string();
        assert!(error.contains("backward is not supported for the gradient of annulus"), "{error}");
    }
    Ok(())
}

#[test]
fn errors_name_the_argument() -> Result<()> {
    let x = |shape: &[usize], dtype| Random(1).tensor(shape, dtype).unwrap();
    let f32 = |shape: &[usize]| x(shape, DType::F32);
    let q = f32(&[1, 8, 4, 16]);
    let plain = || Options::new(Attention::new());
    let ids = |values: Vec<i64>| Tensor::from_vec(values, (1, 8), &CPU).unwrap();
    let refused = |name: &str, result: Result<()>| {
        let error = result.expect_err(name).to_string();
        assert!(error.starts_with(name), "{name}: {error}");
    };
    let call = |q: &Tensor, k: &Tensor, v: &Tensor, options: &Options| {
        attention(q, k, v, options).map(drop)
    };
    refused("q: got [8, 4, 16]", call(&f32(&[8, 4, 16]), &q, &q, &plain()));
    refused("q: got u32", call(&q.to_dtype(DType::U32)?, &q, &q, &plain()));
    refused("k: got bf16", call(&q, &q.to_dtype(DType::BF16)?, &q, &plain()));
    refused("k:", call(&q, &f32(&[1, 8, 4, 15]), &q, &plain()));
    refused("k:", call(&q, &f32(&[1, 9, 4, 16]), &q, &plain()));
    refused("k:", call(&q, &f32(&[2, 8, 4, 16]), &q, &plain()));
    refused("q_heads:", call(&q, &f32(&[1, 8, 3, 16]), &f32(&[1, 8, 3, 16]), &plain()));
    refused("bias: got f64", call(&q, &q, &q, &plain().bias(x(&[1, 1, 8, 8], DType::F64))));
    refused("bias:", call(&q, &q, &q, &plain().bias(f32(&[1, 3, 8, 8]))));
    refused("bias: got [4, 1]", call(&q, &q, &q, &plain().bias(f32(&[4, 1]))));
    refused("sinks: got (3, 1)", call(&q, &q, &q, &plain().sinks(f32(&[3, 1]))));
    refused("sinks: got bf16", call(&q, &q, &q, &plain().sinks(x(&[4, 1], DType::BF16))));
    refused("q_segment_ids: got f32", plain().segment_ids(&f32(&[1, 8]), None).map(drop));
    refused(
        "q_segment_ids: got 4294967296",
        plain().segment_ids(&ids(vec![1 << 32; 8]), None).map(drop),
    );
    let short = Tensor::zeros((1, 7), DType::I64, &CPU)?;
    refused("q_segment_ids:", call(&q, &q, &q, &plain().segment_ids(&short, None)?));
    let capped = Options::new(Attention::new().logits_soft_cap(-1.0));
    refused("logits_soft_cap:", call(&q, &q, &q, &capped));
    let declared = Options::new(Attention::new().bias([1, 1, 8, 8]));
    refused("bias:", call(&q, &q, &q, &declared));
    let var = Var::from_tensor(&q)?;
    let forward_only = Options::new(Attention::new().forward_only(true));
    refused("forward_only:", call(&var, &q, &q, &forward_only));
    call(&q, &q, &q, &forward_only)?;
    Ok(())
}

#[test]
fn empty_sequences() -> Result<()> {
    let q = Var::zeros((2, 3, 2, 8), DType::F32, &CPU)?;
    let empty = Var::zeros((2, 0, 2, 8), DType::F32, &CPU)?;
    let options = Options::new(Attention::new());
    let out = attention(&q, &empty, &empty, &options)?;
    assert_eq!(out.flatten_all()?.to_vec1::<f32>()?, vec![0.0; 96]);
    let gradients = out.sum_all()?.backward()?;
    assert_eq!(gradients.get(&empty).unwrap().dims(), [2, 0, 2, 8]);
    Ok(())
}
