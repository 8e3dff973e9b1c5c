//! The options of C, and the setters of the simple ones.
//! Written from options.toml by `cargo xtask options`.

use annulus::{Alignment, Attention, BackwardMode, BiasOrder, Division, Precision, Result, Runtime};

use crate::{
    fields::{
        ANNULUS_NONE, Versioned, count, flag, number, one_of, optional, positive, seconds,
    },
    tensor::ANNULUS_F32,
};

/// Query i has position i.
pub const ANNULUS_ALIGN_TOP_LEFT: i32 = 0;
/// Query i has position i + kv_len - q_len.
pub const ANNULUS_ALIGN_BOTTOM_RIGHT: i32 = 1;

/// cap * tanh(x / cap) + bias.
pub const ANNULUS_BIAS_AFTER_SOFT_CAP: i32 = 0;
/// cap * tanh((x + bias) / cap).
pub const ANNULUS_BIAS_BEFORE_SOFT_CAP: i32 = 1;

/// No product is rounded, except on matrix units of GPUs: 16-bit probabilities.
pub const ANNULUS_PRECISION_HIGHEST: i32 = 0;
/// Products may be split in three terms.
pub const ANNULUS_PRECISION_HIGH: i32 = 1;
/// Probabilities of bf16 inputs may be rounded to bf16 before they are multiplied.
pub const ANNULUS_PRECISION_DEFAULT: i32 = 2;

/// Keys and values travel again, their gradients one step behind.
pub const ANNULUS_BACKWARD_ONE_PASS: i32 = 0;
/// Keys and values travel for dq, then queries for dk and dv.
pub const ANNULUS_BACKWARD_TWO_PASS: i32 = 1;

/// The mask chooses the layout.
pub const ANNULUS_LAYOUT_AUTO: i32 = 0;
/// Rank r holds one range of rows.
pub const ANNULUS_LAYOUT_CONTIGUOUS: i32 = 1;
/// Of 2 * ranks chunks of rows, rank r holds chunks r and 2 * ranks - 1 - r.
pub const ANNULUS_LAYOUT_ZIGZAG: i32 = 2;
/// Rank r holds rows r, r + ranks, r + 2 * ranks and so on.
pub const ANNULUS_LAYOUT_STRIPED: i32 = 3;
/// The layout of
/// [`annulus_attention_set_custom_layout`](crate::annulus_attention_set_custom_layout).
pub const ANNULUS_LAYOUT_CUSTOM: i32 = 4;
/// Equal rows and balanced work on every rank, for the documents of
/// [`annulus_attention_set_balanced_layout`](crate::annulus_attention_set_balanced_layout).
pub const ANNULUS_LAYOUT_BALANCED: i32 = 5;

/// The mask and the nodes choose the route.
pub const ANNULUS_ROUTE_AUTO: i32 = 0;
/// Blocks travel from rank r to rank r + 1.
pub const ANNULUS_ROUTE_RELAY_UP: i32 = 1;
/// Blocks travel from rank r to rank r - 1.
pub const ANNULUS_ROUTE_RELAY_DOWN: i32 = 2;
/// Blocks travel from their owner to each rank that needs them.
pub const ANNULUS_ROUTE_DIRECT: i32 = 3;
/// As RELAY_UP, around the ranks of each node, then from all of them to the same ranks of the next
/// node. The nodes have as many ranks each.
pub const ANNULUS_ROUTE_RAILS_UP: i32 = 4;
/// As RAILS_UP, in the other direction.
pub const ANNULUS_ROUTE_RAILS_DOWN: i32 = 5;
/// Blocks travel from their owner to one rank of each node, and on to the others of the node that
/// need them. The nodes have as many ranks each.
pub const ANNULUS_ROUTE_ONCE_PER_NODE: i32 = 6;

/// Every rank has all heads of its queries; keys and values circulate over all ranks.
pub const ANNULUS_STRATEGY_RING: i32 = 0;
/// Groups of options.strategy_heads ranks divide the heads; keys and values of these heads
/// circulate over the groups.
pub const ANNULUS_STRATEGY_HEADS_RING: i32 = 1;
/// The strategy that sends the fewest bytes in a forward and a backward pass.
pub const ANNULUS_STRATEGY_AUTO: i32 = 2;
/// options.strategy_heads x strategy_queries x strategy_keys ranks: each computes partial results
/// of a part of the queries over a part of the keys, which are merged.
pub const ANNULUS_STRATEGY_GRID: i32 = 3;
/// All-gather of keys and values: the ring with ANNULUS_ROUTE_DIRECT, whose blocks are all received
/// from the start of a pass on, unless options.receive_ahead says otherwise.
pub const ANNULUS_STRATEGY_ALL_GATHER: i32 = 4;
/// All-to-all over heads among all ranks: HEADS_RING with one group.
pub const ANNULUS_STRATEGY_ALL_TO_ALL: i32 = 5;
/// The ring with ANNULUS_ROUTE_ONCE_PER_NODE.
pub const ANNULUS_STRATEGY_ONCE_PER_NODE: i32 = 6;
/// Queries travel and partial results return: GRID with one part of heads and queries, and as many
/// of the keys as there are ranks.
pub const ANNULUS_STRATEGY_PASS_Q: i32 = 7;

/// The cores of the CPU, by SIMD.
pub const ANNULUS_BACKEND_CPU: i32 = 0;
/// A GPU through Vulkan, Metal or DX12. Not with ANNULUS_F64.
pub const ANNULUS_BACKEND_WGPU: i32 = 1;
/// NVIDIA GPUs.
pub const ANNULUS_BACKEND_CUDA: i32 = 2;
/// AMD GPUs.
pub const ANNULUS_BACKEND_HIP: i32 = 3;

/// Values of `alignment`.
const ALIGNMENTS: [Alignment; 2] = [Alignment::TopLeft, Alignment::BottomRight];

/// Values of `bias_order`.
const BIAS_ORDERS: [BiasOrder; 2] = [BiasOrder::AfterSoftCap, BiasOrder::BeforeSoftCap];

/// Values of `precision`.
const PRECISIONS: [Precision; 3] = [Precision::Highest, Precision::High, Precision::Default];

/// Values of `backward_mode`.
const BACKWARD_MODES: [BackwardMode; 2] = [BackwardMode::OnePass, BackwardMode::TwoPass];

/// The definition of one attention. [`annulus_options_init`](crate::annulus_options_init) sets the
/// defaults; the caller then sets the seven lengths and what differs.
///
/// A pair of query and key is visible if every condition that is given holds; i' and j' are their
/// positions. docs/semantics.md defines every parameter. Flags are 0 or 1.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct annulus_options {
    /// sizeof(annulus_options).
    pub struct_size: u64,
    /// Independent problems, at least 1.
    pub batch: i64,
    /// Queries of the whole sequence, over all ranks; may be 0. With a KV cache it must be 0.
    pub q_len: i64,
    /// Keys of the whole sequence, over all ranks; may be 0. With a KV cache it must be 0.
    pub kv_len: i64,
    /// Query heads, a multiple of kv_heads.
    pub q_heads: i64,
    /// Key and value heads, at least 1.
    pub kv_heads: i64,
    /// Elements of a query and of a key, 1 to 1024.
    pub head_dim: i64,
    /// Elements of a value and of an output, 1 to 1024.
    pub value_dim: i64,
    /// Element type of q, k, v, out and their gradients: ANNULUS_F32 (default), ANNULUS_F64,
    /// ANNULUS_F16 or ANNULUS_BF16.
    pub dtype: i32,
    /// Flag: visible only if j' <= i'. Default: 0.
    pub causal: i32,
    /// Visible only if i' - window_left <= j'. Default: ANNULUS_NONE, an open side.
    pub window_left: i64,
    /// Visible only if j' <= i' + window_right. Default: ANNULUS_NONE, an open side.
    pub window_right: i64,
    /// Keys with j' below this number are exempt from the window, and from nothing else. Without a
    /// window it must be 0. Default: 0.
    pub attention_sink_size: i64,
    /// Visible only if i' and j' are in the same chunk of this many positions and j' <= i'.
    /// Default: 0, which is no chunks.
    pub chunk_size: i64,
    /// Prefix-LM: visible only if j' < prefix_len or j' <= i'. Default: ANNULUS_NONE, no such
    /// condition.
    pub prefix_len: i64,
    /// Positions of queries among the keys: ANNULUS_ALIGN_TOP_LEFT (default) or BOTTOM_RIGHT.
    pub alignment: i32,
    /// Order of bias and soft cap: ANNULUS_BIAS_AFTER_SOFT_CAP (default) or BEFORE_SOFT_CAP.
    pub bias_order: i32,
    /// Flag: softmax_scale is the factor of q * k. Default: 0, the factor is 1 / sqrt(head_dim).
    pub has_softmax_scale: i32,
    /// Flag: out is not divided by the row sum; max, sum and ties are outputs too. Default: 0.
    pub unnormalized: i32,
    /// Factor of q * k, finite. Must be 0 unless has_softmax_scale is set.
    pub softmax_scale: f64,
    /// cap in cap * tanh(x / cap), finite and above 0. Default: 0, which is no cap.
    pub logits_soft_cap: f64,
    /// Shape of the additive bias tensor over the whole sequence, `[batch or 1, q_heads or 1, q_len
    /// or 1, kv_len or 1]`. Default: zeros, no bias.
    pub bias_dims: [i64; 4],
    /// Learnable attention sinks of a head. Default: 0, none.
    pub sinks: i64,
    /// Flag: every query head has sinks of its own. Default: 0, all share them.
    pub sinks_per_head: i32,
    /// Type to which q * k is rounded before scale, bias and cap. Default: 0, the accumulator's.
    pub logits_dtype: i32,
    /// Probability with which a pair is dropped, 0 <= p < 1. Default: 0.
    pub dropout_prob: f64,
    /// Seed of dropout, an unsigned 64-bit number. Must be 0 if dropout_prob is 0. Default: 0.
    pub dropout_seed: u64,
    /// Rounding of products that is permitted: ANNULUS_PRECISION_HIGHEST (default), HIGH or
    /// DEFAULT.
    pub precision: i32,
    /// Form of the backward pass: ANNULUS_BACKWARD_ONE_PASS (default) or TWO_PASS.
    pub backward_mode: i32,
    /// Flag: no backward pass follows, which needs less memory. Default: 0.
    pub forward_only: i32,
    /// Flag: dsoftmax_aux, and dbias broadcast over queries, are each rank's own part instead of
    /// the sum over ranks. Default: 0.
    pub local_gradients: i32,
    /// Assignment of rows to ranks: ANNULUS_LAYOUT_AUTO (default), CONTIGUOUS, ZIGZAG, STRIPED,
    /// CUSTOM or BALANCED.
    pub layout: i32,
    /// Route of the blocks: ANNULUS_ROUTE_AUTO (default), RELAY_UP, RELAY_DOWN, DIRECT, RAILS_UP,
    /// RAILS_DOWN or ONCE_PER_NODE.
    pub route: i32,
    /// Longest silence of a rank within a call before the call fails, in seconds, at least 1.
    /// ANNULUS_DEADLINE in the environment replaces it. A plan over several processes is made only
    /// if all ranks begin to make it within this time. Default: 0, which is 120 s.
    pub deadline_seconds: f64,
    /// Threads that each rank computes with on the CPU. Default: 0, which is 1. With another
    /// backend it must be 0.
    pub threads: i64,
    /// Hint: a KV block is split into messages at multiples of this many rows, so that computing on
    /// one part overlaps receiving the next. Larger parts are fewer and longer messages; results
    /// change by rounding at most, and not with one rank. Ranks may differ: all use the largest.
    /// Default: 0, which is the KV tile of the backend, to multiples of which it is rounded up.
    pub kv_block_size: i64,
    /// Longest wait at the entry of a collective call (a plan, an update, a pass) for ranks that
    /// have not made it, in seconds, at least 1. Then the call fails with ANNULUS_ARRIVAL_TIMEOUT
    /// (`ArrivalTimeout` in Python); an update or a pass has changed nothing and is made again with
    /// the same arguments, within the deadline of the other ranks. Default: 0, which is no limit.
    pub arrival_deadline_seconds: f64,
    /// Flag: the communicator of a plan over MPI is a duplicate that the host has made for it. The
    /// plan takes it over: the host neither uses nor frees it afterwards, also if the call fails,
    /// and nothing is called on any other communicator. Default: 0, the plan makes a duplicate.
    pub adopt_communicator: i32,
    /// Flag: results have the same bits for any number of ranks, layout, transport and threads, on
    /// machines of the same arithmetic (numerics of the command `annulus doctor`). A backward pass
    /// takes two passes around the ring, about 1.4 times the time. Default: 0.
    pub reproducible: i32,
    /// Division of the attention among ranks: ANNULUS_STRATEGY_RING (default), HEADS_RING, AUTO,
    /// GRID, ALL_GATHER, ALL_TO_ALL, ONCE_PER_NODE or PASS_Q. Results differ by rounding at most.
    pub strategy: i32,
    /// Ranks of a group of ANNULUS_STRATEGY_HEADS_RING, or parts of the heads of
    /// ANNULUS_STRATEGY_GRID, at least 1: a divisor of the number of ranks and of q_heads, and a
    /// divisor or a multiple of kv_heads. With other strategies it must be 0. Default: 0.
    pub strategy_heads: i32,
    /// Parts of the queries of ANNULUS_STRATEGY_GRID, at least 1. With other strategies it must be
    /// 0. Default: 0.
    pub strategy_queries: i32,
    /// Parts of the keys of ANNULUS_STRATEGY_GRID, at least 1. With other strategies it must be 0.
    /// Default: 0.
    pub strategy_keys: i32,
    /// Rows of a page of a KV cache (annulus_cache), at least 1; in the reproducible order 256
    /// times a power of two. With plans it must be 0. Default: 0, which is 64, or 256 in the
    /// reproducible order.
    pub page_rows: i64,
    /// What computes: ANNULUS_BACKEND_CPU (default), WGPU, CUDA or HIP. Tensors are in host memory
    /// on each, unless annulus_attention_set_cuda_stream is called. The plans share the GPU.
    /// annulus_attention_create refuses a backend that the library (annulus_features) or the
    /// machine does not have.
    pub backend: i32,
    /// Flag: device is the number of the GPU. Default: 0, which is the GPUs of a node, round robin
    /// over its ranks; with WGPU the first and those of its kind.
    pub has_device: i32,
    /// Number of the GPU, as `annulus doctor` lists them. Must be 0 unless has_device is set.
    pub device: i64,
    /// Ring steps by which a rank posts the receive of a block ahead of the step that computes on
    /// it, equal on all ranks. Each step but the first takes the memory of one more block, and in a
    /// backward pass of its gradients; with 2, a rank does not wait for a neighbour that is late by
    /// less than a step. On a direct route, as many receives are posted as fit into that memory.
    /// Results are the same, bit for bit. Default: 0, which is 1, and 4 on a balanced layout.
    pub receive_ahead: i64,
    /// Flag: the plan also has a JVP and a double backward: derivatives of the outputs along a
    /// direction, and gradients of gradients. On the CPU, with one key column (`ring`, `heads:H`);
    /// not with `reproducible`, nor of an output that is not normalised. Default: 0.
    pub second_derivatives: i32,
    /// Flag: every forward pass writes statistics of the scores too, by row, and by head over all
    /// ranks: the largest scale * q * k, the largest score, the entropy of the probabilities.
    /// Default: 0.
    pub statistics: i32,
}

// SAFETY: repr(C), begins with its size, and all fields are numbers, which may be 0
unsafe impl Versioned for annulus_options {
    const NAME: &'static str = "options";
    const FIRST_BYTES: usize = 248;
}

impl annulus_options {
    pub(crate) fn defaults() -> Self {
        // SAFETY: numbers may be 0
        let zeros: Self = unsafe { std::mem::zeroed() };
        Self {
            struct_size: size_of::<Self>() as u64,
            dtype: ANNULUS_F32,
            window_left: ANNULUS_NONE,
            window_right: ANNULUS_NONE,
            prefix_len: ANNULUS_NONE,
            ..zeros
        }
    }
}

/// Sets the options of mathematics whose form is that of all languages.
pub(crate) fn set_mathematics(builder: Attention, options: &annulus_options) -> Result<Attention> {
    Ok(builder
        .causal(flag("causal", options.causal)?)
        .attention_sink_size(count("attention_sink_size", options.attention_sink_size)?)
        .chunk_size(positive("chunk_size", options.chunk_size)?)
        .prefix_len(optional("prefix_len", options.prefix_len)?)
        .align(one_of("alignment", options.alignment, &ALIGNMENTS)?)
        .bias_order(one_of("bias_order", options.bias_order, &BIAS_ORDERS)?)
        .unnormalized(flag("unnormalized", options.unnormalized)?)
        .logits_soft_cap(number(options.logits_soft_cap))
        .precision(one_of("precision", options.precision, &PRECISIONS)?)
        .backward_mode(one_of("backward_mode", options.backward_mode, &BACKWARD_MODES)?)
        .forward_only(flag("forward_only", options.forward_only)?)
        .local_gradients(flag("local_gradients", options.local_gradients)?)
        .reproducible(flag("reproducible", options.reproducible)?)
        .second_derivatives(flag("second_derivatives", options.second_derivatives)?)
        .statistics(flag("statistics", options.statistics)?))
}

/// Sets the options of division whose form is that of all languages.
pub(crate) fn set_division(builder: Division, options: &annulus_options) -> Result<Division> {
    Ok(builder
        .kv_block_size(positive("kv_block_size", options.kv_block_size)?)
        .receive_ahead(positive("receive_ahead", options.receive_ahead)?))
}

/// Sets the options of runtime whose form is that of all languages.
pub(crate) fn set_runtime(builder: Runtime, options: &annulus_options) -> Result<Runtime> {
    Ok(builder
        .deadline(seconds("deadline_seconds", options.deadline_seconds)?)
        .arrival_deadline(seconds("arrival_deadline_seconds", options.arrival_deadline_seconds)?))
}
