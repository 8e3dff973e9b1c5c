//! The seam: which pass serves which call, for which element type.

use std::ops::Range;

use annulus_core::{Backend, Block, DType, Gradients, Host, HostBuffer, Inputs, Local, Outputs, Precision, Result, Saved, Spec, Tick};
use half::{bf16, f16};

use crate::{
    Isa, backward, backward_keys, backward_queries, backward_together, finish, forward,
    isa::Path,
    records,
    team::Team,
    workspace::{State, Summed, Sums, Workspace},
};

/// Attention on the processors of one host.
///
/// # Examples
/// ```
/// use annulus_core::{Backend, Dims, DType, Spec};
/// let cpu = annulus_cpu::Cpu::new(2)?;
/// assert_eq!(cpu.name(), "cpu");
/// cpu.supports(&Spec::new(Dims::new(1, 4096, 8, 64), DType::Bf16))?;
/// # Ok::<(), annulus_core::Error>(())
/// ```
#[derive(Debug)]
pub struct Cpu {
    team: Team,
    forced: Option<Isa>,
}

impl Cpu {
    /// The most threads of one rank: more than any machine has; beyond, a slip of the pen would only spend minutes in starting threads.
    pub const MOST_THREADS: usize = 1024;

    /// A backend that works on `threads` threads: the one that calls it, and the others in a pool of its own.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`] naming `threads` if there are none or more than [`Cpu::MOST_THREADS`],
    /// [`annulus_core::Error::Device`] if they cannot be started.
    pub fn new(threads: usize) -> Result<Self> {
        if threads > Self::MOST_THREADS {
            return Err(annulus_core::Error::invalid("threads", threads, format!("at most {}", Self::MOST_THREADS)));
        }
        Ok(Self { team: Team::new(threads)?, forced: None })
    }

    /// The same, with tiles for `isa`, whatever [`Isa::VARIABLE`] says.
    ///
    /// # Errors
    /// [`annulus_core::Error::Unsupported`] if the machine lacks it.
    pub fn with_isa(self, isa: Isa) -> Result<Self> {
        Path::new(isa).map(|_| Self { forced: Some(isa), ..self })
    }

    /// How many threads work.
    pub const fn threads(&self) -> usize {
        self.team.threads()
    }

    /// The instruction set of its tiles, but for specs that allow another ([`Cpu::isa_for`]).
    ///
    /// # Errors
    /// As [`Isa::chosen`].
    pub fn isa(&self) -> Result<Isa> {
        self.forced.map_or_else(Isa::chosen, Ok)
    }

    /// The instruction set of the tiles of `spec`: the one that was forced; else [`Isa::Avx512Bf16`] for bf16 inputs and [`Precision::Default`], where
    /// the processor is known to be faster with it; else [`Cpu::isa`].
    ///
    /// # Errors
    /// As [`Isa::chosen`].
    pub fn isa_for(&self, spec: &Spec) -> Result<Isa> {
        if let Some(forced) = self.forced.map_or_else(Isa::forced, |isa| Ok(Some(isa)))? {
            return Ok(forced);
        }
        let may_round = spec.dtype == DType::Bf16 && spec.precision == Precision::Default;
        Ok(if may_round && Isa::pairs_pay() { Isa::Avx512Bf16 } else { Isa::widest() })
    }
}

/// Calls `$call::<E>($($argument),*)` with the element type of the workspace's spec and its state.
macro_rules! by_dtype {
    ($workspace:ident, $state:ident, $element:ident => $call:expr) => {
        match $workspace.dtype() {
            DType::F64 => by_dtype!(@ $workspace, $state, $element, f64, $call),
            DType::F32 => by_dtype!(@ $workspace, $state, $element, f32, $call),
            DType::Bf16 => by_dtype!(@ $workspace, $state, $element, bf16, $call),
            DType::F16 => by_dtype!(@ $workspace, $state, $element, f16, $call),
        }
    };
    (@ $workspace:ident, $state:ident, $element:ident, $type:ty, $call:expr) => {{
        type $element = $type;
        let $state = forward::Acc::<$element>::state($workspace)?;
        $call
    }};
}

impl Workspace {
    const fn dtype(&self) -> DType {
        self.spec_dtype
    }
}

impl Backend for Cpu {
    type Space = Host;
    type Workspace = Workspace;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn arithmetic(&self) -> String {
        // an instruction set that is not there is refused by `supports`
        self.isa().map_or_else(|_| self.name().to_owned(), |isa| format!("cpu {isa:?}"))
    }

    /// bf16 for bf16 inputs on [`Isa::Avx512Bf16`].
    fn narrowing(&self, spec: &Spec) -> Option<DType> {
        let pairs = spec.dtype == DType::Bf16 && self.isa_for(spec) == Ok(Isa::Avx512Bf16);
        pairs.then_some(DType::Bf16)
    }

    /// Everything is supported. Products of f32 inputs are true f32 whatever [`Spec::precision`] allows: never less than was asked for.
    ///
    /// # Errors
    /// As [`Spec::validate`], [`Isa::chosen`].
    fn supports(&self, spec: &Spec) -> Result<()> {
        self.isa()?;
        spec.validate()
    }

    fn allocate(&self, bytes: u64) -> Result<HostBuffer> {
        HostBuffer::zeroed(bytes)
    }

    fn workspace(&self, local: &Local, backward: bool) -> Result<Workspace> {
        let path = Path::new(self.isa_for(&local.spec)?)?;
        let threads = self.team.threads();
        let sums = match local.spec.dtype.accumulator() {
            DType::F64 => Summed::wrap(State::<f64>::new(local, path, threads, backward)?),
            _ => Summed::wrap(State::<f32>::new(local, path, threads, backward)?),
        };
        Ok(Workspace { spec_dtype: local.spec.dtype, sums })
    }

    fn update(&self, workspace: &mut Workspace, local: &Local) -> Result<()> {
        let kept = match &mut workspace.sums {
            Sums::F32(state) => state.update(local),
            Sums::F64(state) => state.update(local),
        };
        let backward = match &workspace.sums {
            Sums::F32(state) => state.backward,
            Sums::F64(state) => state.backward,
        };
        if !kept {
            *workspace = self.workspace(local, backward)?;
        }
        Ok(())
    }

    fn pack(&self, workspace: &mut Workspace, inputs: &Inputs<'_, Host>, into: &mut HostBuffer) -> Result<()> {
        by_dtype!(workspace, state, E => records::pack::<E>(&self.team, state, inputs, into))
    }

    /// Nothing is copied: the calls that attend to the block read keys and values where the caller has them.
    fn pack_alone(&self, workspace: &mut Workspace, _: &Inputs<'_, Host>, _: &mut HostBuffer) -> Result<()> {
        match &mut workspace.sums {
            Sums::F32(state) => state.in_place = true,
            Sums::F64(state) => state.in_place = true,
        }
        Ok(())
    }

    fn begin(&self, workspace: &mut Workspace, _: &Inputs<'_, Host>) -> Result<()> {
        match &mut workspace.sums {
            Sums::F32(state) => forward::begin(&self.team, state),
            Sums::F64(state) => forward::begin(&self.team, state),
        }
        Ok(())
    }

    fn attend(&self, workspace: &mut Workspace, inputs: &Inputs<'_, Host>, block: &Block<'_, Host>, tick: Tick<'_>) -> Result<()> {
        by_dtype!(workspace, state, E => forward::attend::<E>(&self.team, state, inputs, block, tick))
    }

    fn finish(&self, workspace: &mut Workspace, inputs: &Inputs<'_, Host>, outputs: &mut Outputs<'_, Host>) -> Result<()> {
        by_dtype!(workspace, state, E => finish::finish::<E>(&self.team, state, inputs, outputs))
    }

    fn begin_backward(&self, workspace: &mut Workspace, _: &Inputs<'_, Host>, saved: &Saved<'_, Host>) -> Result<()> {
        by_dtype!(workspace, state, E => backward::begin::<E>(&self.team, state, saved))
    }

    fn attend_queries(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, Host>,
        saved: &Saved<'_, Host>,
        block: &Block<'_, Host>,
        tick: Tick<'_>,
    ) -> Result<()> {
        by_dtype!(workspace, state, E => backward_queries::attend_queries::<E>(&self.team, state, inputs, saved, block, tick))
    }

    fn attend_keys(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, Host>,
        saved: &Saved<'_, Host>,
        block: &Block<'_, Host>,
        fresh: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        by_dtype!(workspace, state, E => backward_keys::attend_keys::<E>(&self.team, state, inputs, saved, block, fresh, tick))
    }

    fn attend_backward(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, Host>,
        saved: &Saved<'_, Host>,
        block: &Block<'_, Host>,
        fresh: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        by_dtype!(workspace, state, E => backward_together::attend_backward::<E>(&self.team, state, inputs, saved, block, fresh, tick))
    }

    fn pack_queries(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, Host>,
        saved: &Saved<'_, Host>,
        into: &mut HostBuffer,
    ) -> Result<()> {
        by_dtype!(workspace, state, E => records::pack_queries::<E>(&self.team, state, inputs, saved, into))
    }

    fn attend_keys_home(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, Host>,
        queries: &Block<'_, Host>,
        home: &mut HostBuffer,
        tick: Tick<'_>,
    ) -> Result<()> {
        by_dtype!(workspace, state, E => backward_keys::attend_keys_home::<E>(&self.team, state, inputs, queries, home, tick))
    }

    fn combine(
        &self,
        workspace: &mut Workspace,
        into: &mut HostBuffer,
        from: &HostBuffer,
        (): &(),
        places: &[(Range<u64>, Range<u64>)],
        add: bool,
    ) -> Result<()> {
        match &mut workspace.sums {
            Sums::F32(state) => records::combine(&self.team, state, into, from, places, add),
            Sums::F64(state) => records::combine(&self.team, state, into, from, places, add),
        }
    }

    fn finish_backward(
        &self,
        workspace: &mut Workspace,
        inputs: &Inputs<'_, Host>,
        home: &HostBuffer,
        gradients: &mut Gradients<'_, Host>,
    ) -> Result<()> {
        by_dtype!(workspace, state, E => backward::finish::<E>(&self.team, state, inputs, home, gradients))
    }
}
