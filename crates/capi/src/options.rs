//! The options of an attention, and what the builder makes of them.

use std::{mem, time::Duration};
#[cfg(feature = "emulator")]
use std::{path::PathBuf, sync::OnceLock};

use annulus::{
    Attention, CacheShape, Dims, Division, Error, Layout, Result, Route, Runtime, Setup, SinkShape,
    Strategy,
    backend::{AnyBackend, BackendName},
};

use crate::{
    callbacks::SilenceHook,
    fields::{self, Versioned, flag, length, one_of, optional, seconds},
    option_fields::{
        ANNULUS_LAYOUT_AUTO, ANNULUS_LAYOUT_BALANCED, ANNULUS_LAYOUT_CONTIGUOUS,
        ANNULUS_LAYOUT_CUSTOM, ANNULUS_LAYOUT_STRIPED, ANNULUS_LAYOUT_ZIGZAG,
        ANNULUS_STRATEGY_GRID, ANNULUS_STRATEGY_HEADS_RING, annulus_options, set_division,
        set_mathematics, set_runtime,
    },
    status::guard,
    tensor::dtype,
};

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
        let options = fields::check_pointer(annulus_options::NAME, options.cast_const())?;
        let size = fields::check_size::<annulus_options>(struct_size)?;
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

/// Inputs of a plan, except its transport.
#[derive(Debug, Clone)]
pub(crate) struct Description {
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

/// CUDA context and stream that the host lends, and perhaps an NCCL communicator, as addresses.
///
/// annulus enqueues its work in the host's stream, and never creates, aborts or destroys what it
/// was lent. Pointers stay `void *` in the header, which includes neither cuda.h nor nccl.h.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "refused without the feature"))]
pub(crate) struct HostStream {
    pub(crate) context: usize,
    pub(crate) stream: usize,
    pub(crate) communicator: Option<usize>,
}

/// Options of a plan over MPI.
#[derive(Debug, Clone)]
#[cfg_attr(not(feature = "mpi"), expect(dead_code, reason = "without MPI no plan has these"))]
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
        let attention = mathematics(Attention::new(), options)?;
        let (backend_name, device) = backend(options)?;
        let backend = open(backend_name, device, options.threads)?;
        let runtime = set_runtime(Runtime::new().backend(backend), options)?;
        let setup = Setup { attention, division: division(options)?, runtime };
        let mut checked = setup.clone();
        if matches!(options.bias_dims, [1, heads, 1, _] if heads == 1 || heads == options.q_heads) {
            // it may be a table, which a later call says; the plan checks the shape
            checked.attention = checked.attention.bias(None);
        }
        checked.spec(dims)?;
        let kind = match options.layout {
            ANNULUS_LAYOUT_CUSTOM => Some(ListedKind::Custom),
            ANNULUS_LAYOUT_BALANCED => Some(ListedKind::Balanced),
            _ => None,
        };
        let listed_layout = kind.map(|kind| ListedLayout { kind, given: false });
        let adopts = flag("adopt_communicator", options.adopt_communicator)?;
        let arrival_deadline =
            seconds("arrival_deadline_seconds", options.arrival_deadline_seconds)?;
        Ok(Self {
            mpi: MpiOptions { adopts, arrival_deadline, silence: None },
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

/// Sets the mathematics.
fn mathematics(attention: Attention, options: &annulus_options) -> Result<Attention> {
    let element = dtype("dtype", options.dtype)?;
    let logits = match options.logits_dtype {
        0 => element.accumulator(),
        given => dtype("logits_dtype", given)?,
    };
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
        (count, per_head) => Some(SinkShape { per_head, count }),
    };
    let mut bias = [0; 4];
    for (len, &given) in bias.iter_mut().zip(&options.bias_dims) {
        *len = length("bias_dims", given)?;
    }
    let attention = set_mathematics(attention, options)?;
    Ok(attention
        .dtype(element)
        .logits_dtype(logits)
        .sliding_window(
            optional("window_left", options.window_left)?,
            optional("window_right", options.window_right)?,
        )
        .softmax_scale(has_scale.then_some(options.softmax_scale))
        .bias((bias != [0; 4]).then_some(bias))
        .softmax_aux(sinks)
        .dropout(options.dropout_prob, options.dropout_seed))
}

/// Reads the division among ranks.
fn division(options: &annulus_options) -> Result<Division> {
    let layout = match options.layout {
        ANNULUS_LAYOUT_AUTO | ANNULUS_LAYOUT_CUSTOM | ANNULUS_LAYOUT_BALANCED => None,
        ANNULUS_LAYOUT_CONTIGUOUS => Some(Layout::Contiguous),
        ANNULUS_LAYOUT_ZIGZAG => Some(Layout::Zigzag),
        ANNULUS_LAYOUT_STRIPED => Some(Layout::Striped),
        other => return Err(Error::invalid("layout", other, "a constant ANNULUS_LAYOUT_*")),
    };
    // with the ranks of the nodes of the transport
    let routes = [
        None,
        Some(Route::RelayUp),
        Some(Route::RelayDown),
        Some(Route::Direct),
        Some(Route::RailsUp { node_ranks: 0 }),
        Some(Route::RailsDown { node_ranks: 0 }),
        Some(Route::OncePerNode { node_ranks: 0 }),
    ];
    Ok(set_division(Division::new(), options)?
        .layout(layout)
        .route(one_of("route", options.route, &routes)?)
        .strategy(strategy(options)?))
}

/// Folder of compiled kernels, once CUDA is emulated.
#[cfg(feature = "emulator")]
pub(crate) static EMULATED_KERNELS: OnceLock<PathBuf> = OnceLock::new();

/// Emulates CUDA and NCCL in this process, with compiled kernels in this folder.
#[cfg(feature = "emulator")]
#[doc(hidden)]
pub fn emulate_cuda(kernels: PathBuf) {
    EMULATED_KERNELS.get_or_init(|| kernels);
}

/// True after [`emulate_cuda`].
#[cfg(feature = "emulator")]
#[doc(hidden)]
pub fn is_emulated() -> bool {
    EMULATED_KERNELS.get().is_some()
}

/// Opens the backend.
fn open(name: BackendName, device: Option<usize>, threads: i64) -> Result<AnyBackend> {
    #[cfg(feature = "emulator")]
    if name == BackendName::Cuda && is_emulated() {
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
