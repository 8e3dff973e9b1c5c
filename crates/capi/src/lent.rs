//! Resources that a host lends to plans: a CUDA context, a stream, an NCCL communicator.

/// CUDA context and stream that the host lends, and perhaps an NCCL communicator, as addresses.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "refused without the feature"))]
pub(crate) struct Lent {
    pub(crate) context: usize,
    pub(crate) stream: usize,
    pub(crate) communicator: Option<usize>,
}
