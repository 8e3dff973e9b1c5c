//! Resources that a host lends to plans: a CUDA context, a stream, an NCCL communicator.
//!
//! annulus enqueues its work in the host's stream, and never creates, aborts or destroys what it
//! was lent. Pointers stay `void *` in the header, which includes neither cuda.h nor nccl.h.

/// CUDA context and stream that the host lends, and perhaps an NCCL communicator, as addresses.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "refused without the feature"))]
pub(crate) struct HostStream {
    pub(crate) context: usize,
    pub(crate) stream: usize,
    pub(crate) communicator: Option<usize>,
}
