//! Tiles for host memory (interface only as yet: every computation is a typed error).

use std::ops::Range;

use annulus_core::{Backend, Block, Error, Gradients, Host, Inputs, Local, Outputs, Result, Saved, Space, Spec, Tick};

/// The CPU backend.
#[derive(Debug)]
pub struct Cpu {
    threads: usize,
}

impl Cpu {
    /// A backend with this many threads.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if there are none.
    pub fn new(threads: usize) -> Result<Self> {
        if threads == 0 { Err(Error::invalid("threads", 0, "at least 1")) } else { Ok(Self { threads }) }
    }

    /// Threads that compute.
    pub const fn threads(&self) -> usize {
        self.threads
    }
}

fn none<T>() -> Result<T> {
    Err(Error::unsupported("attention", "this state of the cpu backend"))
}

impl Backend for Cpu {
    type Space = Host;
    type Workspace = ();
    fn name(&self) -> &'static str {
        "cpu"
    }
    fn supports(&self, _: &Spec) -> Result<()> {
        none()
    }
    fn allocate(&self, _: u64) -> Result<<Self::Space as Space>::Buffer> {
        none()
    }
    fn workspace(&self, _: &Local, _: bool) -> Result<Self::Workspace> {
        none()
    }
    fn update(&self, _: &mut Self::Workspace, _: &Local) -> Result<()> {
        none()
    }
    fn pack(
        &self,
        _: &mut Self::Workspace,
        _: &Inputs<'_, Self::Space>,
        _: &mut <Self::Space as Space>::Buffer,
    ) -> Result<<Self::Space as Space>::Event> {
        none()
    }
    fn begin(&self, _: &mut Self::Workspace, _: &Inputs<'_, Self::Space>) -> Result<()> {
        none()
    }
    fn attend(&self, _: &mut Self::Workspace, _: &Inputs<'_, Self::Space>, _: &Block<'_, Self::Space>, _: Tick<'_>) -> Result<()> {
        none()
    }
    fn finish(&self, _: &mut Self::Workspace, _: &Inputs<'_, Self::Space>, _: &mut Outputs<'_, Self::Space>) -> Result<()> {
        none()
    }
    fn begin_backward(&self, _: &mut Self::Workspace, _: &Inputs<'_, Self::Space>, _: &Saved<'_, Self::Space>) -> Result<()> {
        none()
    }
    fn attend_queries(
        &self,
        _: &mut Self::Workspace,
        _: &Inputs<'_, Self::Space>,
        _: &Saved<'_, Self::Space>,
        _: &Block<'_, Self::Space>,
        _: Tick<'_>,
    ) -> Result<()> {
        none()
    }
    fn attend_keys(
        &self,
        _: &mut Self::Workspace,
        _: &Inputs<'_, Self::Space>,
        _: &Saved<'_, Self::Space>,
        _: &Block<'_, Self::Space>,
        _: &mut <Self::Space as Space>::Buffer,
        _: Tick<'_>,
    ) -> Result<<Self::Space as Space>::Event> {
        none()
    }
    fn pack_queries(
        &self,
        _: &mut Self::Workspace,
        _: &Inputs<'_, Self::Space>,
        _: &Saved<'_, Self::Space>,
        _: &mut <Self::Space as Space>::Buffer,
    ) -> Result<<Self::Space as Space>::Event> {
        none()
    }
    fn attend_keys_home(
        &self,
        _: &mut Self::Workspace,
        _: &Inputs<'_, Self::Space>,
        _: &Block<'_, Self::Space>,
        _: &mut <Self::Space as Space>::Buffer,
        _: Tick<'_>,
    ) -> Result<()> {
        none()
    }
    fn combine(
        &self,
        _: &mut Self::Workspace,
        _: &mut <Self::Space as Space>::Buffer,
        _: &<Self::Space as Space>::Buffer,
        _: &<Self::Space as Space>::Event,
        _: &[(Range<u64>, Range<u64>)],
        _: bool,
    ) -> Result<<Self::Space as Space>::Event> {
        none()
    }
    fn finish_backward(
        &self,
        _: &mut Self::Workspace,
        _: &Inputs<'_, Self::Space>,
        _: &<Self::Space as Space>::Buffer,
        _: &mut Gradients<'_, Self::Space>,
    ) -> Result<()> {
        none()
    }
}
