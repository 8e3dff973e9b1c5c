//! The options of an attention, and what the builder makes of them.

use std::{mem, time::Duration};

use annulus::{
    Alignment, AnyBackend, Attention, BackendName, BackwardMode, BiasOrder, CacheShape, Dims,
    Division, Error, Layout, Precision, Result, Route, Runtime, Setup, SinkShape, Strategy,
};

#[cfg(feature = "mpi")]
use crate::callbacks::SilenceHook;
use crate::{
    host_stream::HostStream,
    status::guard,
    tensor::{ANNULUS_F32, dtype},
    versioned::{self, Versioned},
};

/// No limit: a side of the sliding window that is open, or no prefix.
pub const ANNULUS_NONE: i64 = -1;

/// Position of query i among the keys: i.
pub const ANNULUS_ALIGN_TOP_LEFT: i32 = 0;
/// Position of query i among the keys: i + kv_len - q_len.
pub const ANNULUS_ALIGN_BOTTOM_RIGHT: i32 = 1;

/// cap * tanh(x / cap) + bias.
pub const ANNULUS_BIAS_AFTER_SOFT_CAP: i32 = 0;
/// cap * tanh((x + bias) / cap).
pub const ANNULUS_BIAS_BEFORE_SOFT_CAP: i32 = 1;

/// No product is rounded.
pub const ANNULUS_PRECISION_HIGHEST: i32 = 0;
/// Products may be split in three terms.
pub const ANNULUS_PRECISION_HIGH: i32 = 1;
/// Probabilities of bf16 inputs may be rounded to bf16 before they are multiplied.
pub const ANNULUS_PRECISION_DEFAULT: i32 = 2;

/// Keys and values travel again in the backward pass, their gradients one step behind.
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

/// The mask chooses the route.
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
/// options.strategy_heads x strategy_queries x strategy_keys ranks: each computes partial results of
/// a part of the queries over a part of the keys, which are merged.
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

/// The definition of one attention. [`annulus_options_init`] sets the defaults; the caller then
/// sets the seven lengths and what differs.
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
    /// Elements of a query and of a key, 1 to 512.
    pub head_dim: i64,
    /// Elements of a value and of an output, 1 to 512.
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
    /// Default: 0, no chunks.
    pub chunk_size: i64,
    /// Visible only if j' < prefix_len or j' <= i'. Default: ANNULUS_NONE, no such condition.
    pub prefix_len: i64,
    /// ANNULUS_ALIGN_TOP_LEFT (default) or ANNULUS_ALIGN_BOTTOM_RIGHT.
    pub alignment: i32,
    /// ANNULUS_BIAS_AFTER_SOFT_CAP (default) or ANNULUS_BIAS_BEFORE_SOFT_CAP.
    pub bias_order: i32,
    /// Flag: softmax_scale is the factor of q * k. Default: 0, the factor is 1 / sqrt(head_dim).
    pub has_softmax_scale: i32,
    /// Flag: out is not divided by the row sum; max, sum and ties are outputs too. Default: 0.
    pub unnormalized: i32,
    /// Factor of q * k, finite. Must be 0 unless has_softmax_scale is set.
    pub softmax_scale: f64,
    /// cap in cap * tanh(x / cap), finite and above 0. Default: 0, no cap.
    pub logits_soft_cap: f64,
    /// Shape of the additive bias tensor over the whole sequence,
    /// `[batch or 1, q_heads or 1, q_len or 1, kv_len or 1]`. Default: zeros, no bias.
    pub bias_dims: [i64; 4],
    /// Learnable attention sinks of a head. Default: 0, none.
    pub sinks: i64,
    /// Flag: every query head has sinks of its own. Default: 0, all share them.
    pub sinks_per_head: i32,
    /// Type to which q * k is rounded before scale, bias and cap. Default: 0, the accumulator's.
    pub logits_dtype: i32,
    /// Probability with which a pair is dropped, 0 <= p < 1. Default: 0.
    pub dropout_prob: f64,
    /// Seed of dropout. Must be 0 if dropout_prob is 0.
    pub dropout_seed: u64,
    /// ANNULUS_PRECISION_HIGHEST (default), ANNULUS_PRECISION_HIGH or ANNULUS_PRECISION_DEFAULT.
    pub precision: i32,
    /// ANNULUS_BACKWARD_ONE_PASS (default) or ANNULUS_BACKWARD_TWO_PASS.
    pub backward_mode: i32,
    /// Flag: no backward pass follows, which needs less memory. Default: 0.
    pub forward_only: i32,
    /// Flag: dsoftmax_aux, and dbias broadcast over queries, are each rank's own part instead of
    /// the sum over ranks. Default: 0.
    pub local_gradients: i32,
    /// ANNULUS_LAYOUT_AUTO (default), CONTIGUOUS, ZIGZAG, STRIPED, CUSTOM or BALANCED.
    pub layout: i32,
    /// ANNULUS_ROUTE_AUTO (default), RELAY_UP, RELAY_DOWN, DIRECT, RAILS_UP, RAILS_DOWN or
    /// ONCE_PER_NODE.
    pub route: i32,
    /// Longest silence of a rank within a call before the call fails, in seconds, at least 1.
    /// Default: 0, which is 120 s. ANNULUS_DEADLINE in the environment replaces it.
    pub deadline_seconds: f64,
    /// Threads that each rank computes with on the CPU. Default: 0, which is 1. With another backend
    /// it must be 0.
    pub threads: i64,
    /// Hint: rows at multiples of which a block of keys and values is split into messages. Ranks
    /// may differ: all use the largest. Default: 0, the KV tile of the backend.
    pub kv_block_size: i64,
    /// Longest wait at the entry of a collective call (a plan, an update, a pass) for ranks that
    /// have not made it, in seconds, at least 1. Then the call returns ANNULUS_ARRIVAL_TIMEOUT; a
    /// pass or an update is to be made again with the same arguments. Default: 0, no limit.
    pub arrival_deadline_seconds: f64,
    /// Flag: the communicator of a plan over MPI is a duplicate that the host has made for it. The
    /// plan takes it over: the host neither uses nor frees it afterwards, also if the call fails,
    /// and nothing is called on any other communicator. Default: 0, the plan makes a duplicate.
    pub adopt_communicator: i32,
    /// Flag: results have the same bits for any number of ranks, layout, transport and threads, on
    /// machines of the same arithmetic ("numerics" of the command `annulus doctor`). A backward
    /// pass takes two passes around the ring. Default: 0.
    pub reproducible: i32,
    /// ANNULUS_STRATEGY_RING (default), HEADS_RING, AUTO, GRID, ALL_GATHER, ALL_TO_ALL,
    /// ONCE_PER_NODE or PASS_Q: the division of the attention among ranks. Results differ by
    /// rounding at most.
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
    /// ANNULUS_BACKEND_CPU (default), WGPU or CUDA: what computes the plans of this attention.
    /// Tensors are in host memory on each, unless annulus_attention_set_cuda_stream is called. The
    /// plans share the GPU. annulus_attention_create refuses a backend that the library
    /// (annulus_features) or the machine does not have.
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
}

// SAFETY: repr(C), begins with its size, and all fields are numbers, which may be 0
unsafe impl Versioned for annulus_options {
    const NAME: &'static str = "options";
    const FIRST_BYTES: usize = 248;
}

// fields are appended, never removed
const _: () = assert!(size_of::<annulus_options>() >= annulus_options::FIRST_BYTES);

impl annulus_options {
    fn defaults() -> Self {
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

/// Sets the defaults of all options, and `struct_size`.
///
/// `struct_size` is sizeof(annulus_options) of the header that the program was compiled with.
///
/// # Errors
/// ANNULUS_INVALID_ARGUMENT for NULL or a size that no version of the struct has.
///
/// # Safety
/// `options` is NULL or points to `struct_size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn annulus_options_init(
    options: *mut annulus_options,
    struct_size: u64,
) -> std::ffi::c_int {
    guard(|| {
        let options = versioned::check_pointer(annulus_options::NAME, options.cast_const())?;
        let size = versioned::check_size::<annulus_options>(struct_size)?;
        let defaults = annulus_options { struct_size, ..annulus_options::defaults() };
        let known = size.min(size_of::<annulus_options>());
        // SAFETY: the caller promises `size` writable bytes, `known` is no more; a struct on the
        // stack is no part of them. Bytes of a newer header are 0: none, or the default
        unsafe {
            let bytes = options.as_ptr().cast::<u8>();
            bytes.add(known).write_bytes(0, size - known);
            bytes.copy_from_nonoverlapping((&raw const defaults).cast(), known);
        }
        Ok(())
    })
}

/// Reads a length.
pub(crate) fn length(name: &str, value: i64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::invalid(name, value, "0 or more"))
}

/// Reads a number of which [`ANNULUS_NONE`] says that there is none.
fn optional(name: &str, value: i64) -> Result<Option<u64>> {
    match value {
        ANNULUS_NONE => Ok(None),
        value => u64::try_from(value)
            .map(Some)
            .map_err(|_| Error::invalid(name, value, "0 or more, or ANNULUS_NONE")),
    }
}

/// Reads a flag.
pub(crate) fn flag(name: &str, value: i32) -> Result<bool> {
    match value {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(Error::invalid(name, other, "0 or 1")),
    }
}

/// Reads one of several constants, which count from 0.
fn one_of<T: Copy>(name: &str, value: i32, all: &[T]) -> Result<T> {
    let chosen = usize::try_from(value).ok().and_then(|value| all.get(value));
    chosen.copied().ok_or_else(|| {
        Error::invalid(name, value, format!("a constant from 0 to {}", all.len() - 1))
    })
}

/// Inputs of a plan, except its transport.
#[derive(Debug, Clone)]
pub(crate) struct Description {
    #[cfg(feature = "mpi")]
    pub(crate) mpi: MpiOptions,
    pub(crate) setup: Setup,
    pub(crate) dims: Dims,
    pub(crate) backend_name: BackendName,
    /// Number of the GPU.
    pub(crate) device: Option<usize>,
    /// CUDA stream of the host's, for tensors in device memory.
    pub(crate) host_stream: Option<HostStream>,
    /// Layout whose rows are listed, if one is chosen.
    pub(crate) listed_layout: Option<ListedLayout>,
    pub(crate) strategy: Strategy,
    /// Rows of a page of a KV cache; 0 for the default.
    pub(crate) page_rows: usize,
}

/// Options of a plan over MPI.
#[cfg(feature = "mpi")]
#[derive(Debug, Clone)]
pub(crate) struct MpiOptions {
    /// True to take over the communicator.
    pub(crate) adopts: bool,
    pub(crate) arrival_deadline: Option<Duration>,
    /// Function that is called while ranks are late.
    pub(crate) silence: Option<SilenceHook>,
}

/// A layout that options choose, and another call gives the rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ListedLayout {
    pub(crate) kind: ListedKind,
    /// True after that call.
    pub(crate) given: bool,
}

/// Layouts whose rows are listed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ListedKind {
    /// ANNULUS_LAYOUT_CUSTOM.
    Custom,
    /// ANNULUS_LAYOUT_BALANCED.
    Balanced,
}

impl ListedKind {
    /// Constant and function, for messages.
    const fn names(self) -> [&'static str; 2] {
        match self {
            Self::Custom => ["ANNULUS_LAYOUT_CUSTOM", "annulus_attention_set_custom_layout"],
            Self::Balanced => ["ANNULUS_LAYOUT_BALANCED", "annulus_attention_set_balanced_layout"],
        }
    }
}

impl Description {
    pub(crate) fn of(options: &annulus_options) -> Result<Self> {
        let dims = Dims {
            batch: length("batch", options.batch)?,
            q_len: length("q_len", options.q_len)?,
            kv_len: length("kv_len", options.kv_len)?,
            q_heads: length("q_heads", options.q_heads)?,
            kv_heads: length("kv_heads", options.kv_heads)?,
            head_dim: length("head_dim", options.head_dim)?,
            value_dim: length("value_dim", options.value_dim)?,
        };
        let attention = masks(Attention::new(), options)?;
        let attention = scores(attention, options)?;
        let attention = passes(attention, options)?;
        let (backend_name, device) = backend(options)?;
        let backend = open(backend_name, device, options.threads)?;
        let runtime = runtime(options)?.backend(backend);
        let setup = Setup { attention, division: division(options)?, runtime };
        setup.spec(dims)?;
        let kind = match options.layout {
            ANNULUS_LAYOUT_CUSTOM => Some(ListedKind::Custom),
            ANNULUS_LAYOUT_BALANCED => Some(ListedKind::Balanced),
            _ => None,
        };
        let listed_layout = kind.map(|kind| ListedLayout { kind, given: false });
        let adopts = adopts(options)?;
        #[cfg(not(feature = "mpi"))]
        let _: bool = adopts;
        Ok(Self {
            #[cfg(feature = "mpi")]
            mpi: MpiOptions { adopts, arrival_deadline: arrival_deadline(options)?, silence: None },
            setup,
            dims,
            backend_name,
            device,
            host_stream: None,
            listed_layout,
            strategy: strategy(options)?,
            page_rows: length("page_rows", options.page_rows)?,
        })
    }

    /// Changes the mathematics.
    pub(crate) fn set_attention(&mut self, set: impl FnOnce(Attention) -> Attention) {
        self.setup = mem::take(&mut self.setup).map_attention(set);
    }

    /// Changes the division among ranks.
    pub(crate) fn set_division(&mut self, set: impl FnOnce(Division) -> Division) {
        self.setup = mem::take(&mut self.setup).map_division(set);
    }

    /// Changes the runtime.
    pub(crate) fn set_runtime(&mut self, set: impl FnOnce(Runtime) -> Runtime) {
        self.setup = mem::take(&mut self.setup).map_runtime(set);
    }

    /// Sets the rows of the listed layout: `place` returns the division that has them.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `layout` if the options chose another one; those of
    /// `place`.
    pub(crate) fn list(
        &mut self,
        kind: ListedKind,
        place: impl FnOnce(Division, &Attention, Dims) -> Result<Division>,
    ) -> Result<()> {
        let Some(listed) = self.listed_layout.as_mut().filter(|listed| listed.kind == kind) else {
            let want = format!("options.layout = {}", kind.names()[0]);
            return Err(Error::invalid("layout", "another layout", want));
        };
        let division = self.setup.division.clone();
        self.setup.division = place(division, &self.setup.attention, self.dims)?;
        listed.given = true;
        Ok(())
    }

    /// Checks that a plan can be made of this.
    pub(crate) fn check_plan(&self) -> Result<()> {
        if self.page_rows > 0 {
            return Err(Error::invalid("page_rows", self.page_rows, "0: a plan has no pages"));
        }
        self.check_listed()
    }

    /// Returns the lengths of a KV cache.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] and [`Error::Unsupported`] naming an option of plans.
    pub(crate) fn cache_shape(&self) -> Result<CacheShape> {
        let Dims { batch, q_len, kv_len, q_heads, kv_heads, head_dim, value_dim } = self.dims;
        for (name, len) in [("q_len", q_len), ("kv_len", kv_len)] {
            if len > 0 {
                return Err(Error::invalid(name, len, "0: a cache has the rows that are appended"));
            }
        }
        let layout = self.listed_layout.map(|_| "layout");
        if let Some(name) = layout.or(self.setup.division.first_set()) {
            return Err(Error::unsupported(name, "the KV cache"));
        }
        self.check_host_tensors("the KV cache")?;
        let shape = CacheShape::new(batch, q_heads, head_dim);
        let shape = shape.kv_heads(kv_heads).value_dim(value_dim);
        Ok(if self.page_rows > 0 { shape.page_rows(self.page_rows as u64) } else { shape })
    }

    /// Checks that the rows of a listed layout were given.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] naming `layout` and the call that gives them.
    pub(crate) fn check_listed(&self) -> Result<()> {
        match self.listed_layout {
            Some(ListedLayout { kind, given: false }) => {
                let [constant, function] = kind.names();
                let got = format!("{constant} without its rows");
                Err(Error::invalid("layout", got, format!("{function} before")))
            }
            _ => Ok(()),
        }
    }
}

fn masks(attention: Attention, options: &annulus_options) -> Result<Attention> {
    let attention = attention
        .causal(flag("causal", options.causal)?)
        .sliding_window(
            optional("window_left", options.window_left)?,
            optional("window_right", options.window_right)?,
        )
        .attention_sink_size(length("attention_sink_size", options.attention_sink_size)? as u64)
        .prefix_len(optional("prefix_len", options.prefix_len)?)
        .align(one_of(
            "alignment",
            options.alignment,
            &[Alignment::TopLeft, Alignment::BottomRight],
        )?);
    let chunk_size = length("chunk_size", options.chunk_size)? as u64;
    Ok(attention.chunk_size((chunk_size > 0).then_some(chunk_size)))
}

fn scores(attention: Attention, options: &annulus_options) -> Result<Attention> {
    let has_scale = flag("has_softmax_scale", options.has_softmax_scale)?;
    if !has_scale && options.softmax_scale != 0.0 {
        let want = "0, or has_softmax_scale = 1";
        return Err(Error::invalid("softmax_scale", options.softmax_scale, want));
    }
    if options.dropout_prob == 0.0 && options.dropout_seed != 0 {
        let want = "0, or a dropout_prob above 0";
        return Err(Error::invalid("dropout_seed", options.dropout_seed, want));
    }
    let per_head = flag("sinks_per_head", options.sinks_per_head)?;
    let sinks = match (length("sinks", options.sinks)?, per_head) {
        (0, false) => None,
        // refused by the spec, by name
        (count, true) => Some(SinkShape::per_head(count)),
        (count, false) => Some(SinkShape::shared(count)),
    };
    let bias = match options.bias_dims {
        [0, 0, 0, 0] => None,
        [batch, heads, queries, keys] => Some([
            length("bias_dims", batch)?,
            length("bias_dims", heads)?,
            length("bias_dims", queries)?,
            length("bias_dims", keys)?,
        ]),
    };
    let orders = [BiasOrder::AfterSoftCap, BiasOrder::BeforeSoftCap];
    let precisions = [Precision::Highest, Precision::High, Precision::Default];
    let element = dtype("dtype", options.dtype)?;
    let logits = match options.logits_dtype {
        0 => element.accumulator(),
        given => dtype("logits_dtype", given)?,
    };
    Ok(attention
        .dtype(element)
        .logits_dtype(logits)
        .softmax_scale(has_scale.then_some(options.softmax_scale))
        .logits_soft_cap((options.logits_soft_cap != 0.0).then_some(options.logits_soft_cap))
        .bias(bias)
        .bias_order(one_of("bias_order", options.bias_order, &orders)?)
        .softmax_aux(sinks)
        .unnormalized(flag("unnormalized", options.unnormalized)?)
        .dropout(options.dropout_prob, options.dropout_seed)
        .precision(one_of("precision", options.precision, &precisions)?))
}

fn passes(attention: Attention, options: &annulus_options) -> Result<Attention> {
    let modes = [BackwardMode::OnePass, BackwardMode::TwoPass];
    Ok(attention
        .backward_mode(one_of("backward_mode", options.backward_mode, &modes)?)
        .forward_only(flag("forward_only", options.forward_only)?)
        .local_gradients(flag("local_gradients", options.local_gradients)?)
        .reproducible(flag("reproducible", options.reproducible)?))
}

fn runtime(options: &annulus_options) -> Result<Runtime> {
    Ok(Runtime::new()
        .deadline(seconds("deadline_seconds", options.deadline_seconds)?)
        .arrival_deadline(arrival_deadline(options)?))
}

fn division(options: &annulus_options) -> Result<Division> {
    let kv_block_size = length("kv_block_size", options.kv_block_size)? as u64;
    let receive_ahead = length("receive_ahead", options.receive_ahead)?;
    let layout = match options.layout {
        ANNULUS_LAYOUT_AUTO | ANNULUS_LAYOUT_CUSTOM | ANNULUS_LAYOUT_BALANCED => None,
        ANNULUS_LAYOUT_CONTIGUOUS => Some(Layout::Contiguous),
        ANNULUS_LAYOUT_ZIGZAG => Some(Layout::Zigzag),
        ANNULUS_LAYOUT_STRIPED => Some(Layout::Striped),
        other => return Err(Error::invalid("layout", other, "a constant ANNULUS_LAYOUT_*")),
    };
    // with the ranks of the nodes of the transport
    let rails = [Route::RailsUp { node_ranks: 0 }, Route::RailsDown { node_ranks: 0 }];
    let routes = [
        None,
        Some(Route::RelayUp),
        Some(Route::RelayDown),
        Some(Route::Direct),
        Some(rails[0]),
        Some(rails[1]),
        Some(Route::OncePerNode { node_ranks: 0 }),
    ];
    Ok(Division::new()
        .layout(layout)
        .strategy(strategy(options)?)
        .kv_block_size((kv_block_size > 0).then_some(kv_block_size))
        .receive_ahead((receive_ahead > 0).then_some(receive_ahead))
        .route(one_of("route", options.route, &routes)?))
}

/// Opens the backend.
fn open(name: BackendName, device: Option<usize>, threads: i64) -> Result<AnyBackend> {
    #[cfg(feature = "emulator")]
    if name == BackendName::Cuda && crate::driver::is_emulated() {
        // only streams of the host's are emulated
        return AnyBackend::open(BackendName::Cpu, None, 0);
    }
    AnyBackend::open(name, device, length("threads", threads)?)
}

/// Reads the backend and the number of the GPU.
fn backend(options: &annulus_options) -> Result<(BackendName, Option<usize>)> {
    let annulus_options { backend, has_device, device, .. } = *options;
    let name = one_of("backend", backend, &BackendName::ALL)?;
    let has_device = flag("has_device", has_device)?;
    if !has_device && device != 0 {
        return Err(Error::invalid("device", device, "0, or has_device = 1"));
    }
    Ok((name, has_device.then(|| length("device", device)).transpose()?))
}

fn strategy(options: &annulus_options) -> Result<Strategy> {
    let annulus_options { strategy_heads, strategy_queries, strategy_keys, .. } = *options;
    let heads = length("strategy_heads", strategy_heads.into())?;
    let queries = length("strategy_queries", strategy_queries.into())?;
    let keys = length("strategy_keys", strategy_keys.into())?;
    let ring = Strategy::HeadsRing { heads };
    let grid = Strategy::Grid { heads, queries, keys };
    let once_per_node = Strategy::OncePerNode { node_ranks: 0 };
    let strategies = [
        Strategy::Ring,
        ring,
        Strategy::Auto,
        grid,
        Strategy::AllGather,
        Strategy::AllToAll,
        once_per_node,
        Strategy::PassQ,
    ];
    let strategy = one_of("strategy", options.strategy, &strategies)?;
    let is_grid = options.strategy == ANNULUS_STRATEGY_GRID;
    let divides_heads = is_grid || options.strategy == ANNULUS_STRATEGY_HEADS_RING;
    let of_heads = "0, or options.strategy = ANNULUS_STRATEGY_HEADS_RING or _GRID";
    let of_grid = "0, or options.strategy = ANNULUS_STRATEGY_GRID";
    let counts = [
        ("strategy_heads", strategy_heads, divides_heads, of_heads),
        ("strategy_queries", strategy_queries, is_grid, of_grid),
        ("strategy_keys", strategy_keys, is_grid, of_grid),
    ];
    for (name, count, is_used, unused) in counts {
        match (is_used, count > 0) {
            (true, false) => return Err(Error::invalid(name, count, "at least 1")),
            (false, true) => return Err(Error::invalid(name, count, unused)),
            _ => {}
        }
    }
    Ok(strategy)
}

fn arrival_deadline(options: &annulus_options) -> Result<Option<Duration>> {
    seconds("arrival_deadline_seconds", options.arrival_deadline_seconds)
}

fn adopts(options: &annulus_options) -> Result<bool> {
    flag("adopt_communicator", options.adopt_communicator)
}

/// Reads a time; 0 is none.
fn seconds(name: &str, seconds: f64) -> Result<Option<Duration>> {
    let time = (seconds != 0.0).then(|| Duration::try_from_secs_f64(seconds)).transpose();
    time.map_err(|_| Error::invalid(name, seconds, "at least 1, or 0"))
}
