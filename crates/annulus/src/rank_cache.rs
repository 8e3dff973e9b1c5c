//! One rank of a KV cache whose backend is hidden, so that [`crate::Cache`] has the same type on
//! each.

use annulus_comm::{
    kv_cache::{Attend, KvCache},
    ring::Report,
};
use annulus_core::{Backend, Error, HostTensors, HostView, Result, Runs, Spec};

/// Methods of [`KvCache`].
pub(crate) trait RankCache: Send {
    fn append(&mut self, k: &HostView<'_>, v: &HostView<'_>) -> Result<()>;
    fn append_own(&mut self, count: usize, k: &HostView<'_>, v: &HostView<'_>) -> Result<()>;
    fn truncate(&mut self, len: u64) -> Result<()>;
    fn attend(&mut self, tensors: Attend<'_>) -> Result<Report>;
    fn refuse(&mut self, why: Error) -> Error;
    fn own_rows(&self, count: usize) -> Result<Runs>;
    fn len(&self) -> u64;
    fn local_len(&self) -> u64;
    fn page_rows(&self) -> u64;
    fn rank(&self) -> usize;
    fn ranks(&self) -> usize;
    fn spec(&self) -> &Spec;
    fn bytes_predicted_at(&self, len: u64, queries: usize) -> u64;
    fn buffer_bytes(&self) -> u64;
}

impl<B: Backend<Space: HostTensors>> RankCache for KvCache<B> {
    fn append(&mut self, k: &HostView<'_>, v: &HostView<'_>) -> Result<()> {
        Self::append(self, k, v)
    }
    fn append_own(&mut self, count: usize, k: &HostView<'_>, v: &HostView<'_>) -> Result<()> {
        Self::append_own(self, count, k, v)
    }
    fn truncate(&mut self, len: u64) -> Result<()> {
        Self::truncate(self, len)
    }
    fn attend(&mut self, tensors: Attend<'_>) -> Result<Report> {
        Self::attend(self, tensors)
    }
    fn refuse(&mut self, why: Error) -> Error {
        Self::refuse(self, why)
    }
    fn own_rows(&self, count: usize) -> Result<Runs> {
        Self::own_rows(self, count)
    }
    fn len(&self) -> u64 {
        Self::len(self)
    }
    fn local_len(&self) -> u64 {
        Self::local_len(self)
    }
    fn page_rows(&self) -> u64 {
        Self::page_rows(self)
    }
    fn rank(&self) -> usize {
        Self::rank(self)
    }
    fn ranks(&self) -> usize {
        Self::ranks(self)
    }
    fn spec(&self) -> &Spec {
        Self::spec(self)
    }
    fn bytes_predicted_at(&self, len: u64, queries: usize) -> u64 {
        Self::bytes_predicted_at(self, len, queries)
    }
    fn buffer_bytes(&self) -> u64 {
        Self::buffer_bytes(self)
    }
}
