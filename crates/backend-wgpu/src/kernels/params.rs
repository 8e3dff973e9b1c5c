//! Uniform parameters of the kernels, declared once for Rust and WGSL.

/// Offset of a tensor's first element in its binding, and strides, in elements: four numbers of
/// the WGSL struct, `*_base`, `*_row`, `*_batch` and `*_head`.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
pub(crate) struct Strided {
    pub(crate) base: u32,
    pub(crate) row: u32,
    pub(crate) batch: u32,
    pub(crate) head: u32,
}

/// A field in WGSL.
macro_rules! wgsl_field {
    ($field:ident Strided) => {
        concat!(
            wgsl_field!($field "_base" u32),
            wgsl_field!($field "_row" u32),
            wgsl_field!($field "_batch" u32),
            wgsl_field!($field "_head" u32),
        )
    };
    ($field:ident $($suffix:literal)? $kind:ident) => {
        concat!("    ", stringify!($field), $($suffix,)? ": ", stringify!($kind), ",\n")
    };
}

/// Declares a struct of 4-byte numbers in Rust and WGSL.
macro_rules! params {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ident,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
        pub(crate) struct $name {
            $($(#[$field_doc])* pub(crate) $field: $kind,)*
        }

        impl $name {
            /// The struct in WGSL.
            pub(crate) const WGSL: &'static str = concat!(
                "struct Params {\n",
                $(wgsl_field!($field $kind),)*
                "}\n"
            );
        }
    };
}

params! {
    /// Parameters of the tile kernels. Tensors begin at the chunk's first element.
    TileParams {
        /// Batch rows and query heads of the chunk.
        batch_first: u32,
        batches: u32,
        head_first: u32,
        heads: u32,
        kv_head_first: u32,
        kv_heads: u32,
        /// Query heads per KV head.
        group_heads: u32,
        /// Dropout: number of the chunk's first head, and of heads, in the whole attention.
        dropout_head_first: u32,
        dropout_q_heads: u32,
        /// Rows of the chunk.
        queries: u32,
        keys: u32,
        head_dim: u32,
        value_dim: u32,
        /// Tiles per head of the owning side; workgroups of this launch; workgroups per grid row.
        tiles: u32,
        first_group: u32,
        end_group: u32,
        grid_width: u32,
        /// 1: workgroups begin with the last list of each plane.
        is_reversed: u32,
        /// Decoding: heads and queries per tile; ranges of keys per tile.
        packed_heads: u32,
        packed_queries: u32,
        ranges: u32,
        /// Offsets in the block mask.
        lists: u32,
        runs: u32,
        bits: u32,
        query_rows: u32,
        key_rows: u32,
        function_at: u32,
        plane_batch: u32,
        plane_head: u32,
        q: Strided,
        k: Strided,
        v: Strided,
        dout: Strided,
        statistics: Strided,
        statistics_range: u32,
        /// Accumulators: of O, dQ or dK, and of dV.
        acc: Strided,
        acc_range: u32,
        dv_base: u32,
        dv_batch: u32,
        dv_head: u32,
        bias: Strided,
        bias_keys: u32,
        bias_heads: u32,
        dbias: Strided,
        has_bias: u32,
        bias_first: u32,
        normalize: u32,
        /// Element type to which products are rounded: 0 none, 1 bf16, 2 f16.
        logits_dtype: u32,
        /// ⌊p·2³²⌋ of dropout; key of Philox.
        threshold: u32,
        key_low: u32,
        key_high: u32,
        /// 1: dK and dV are accumulated.
        add: u32,
        keep_scale: f32,
        scale: f32,
        /// Soft cap; 0: none.
        cap: f32,
    }
}

params! {
    /// Parameters of the copy kernel.
    CopyParams {
        /// Invocations; workgroups per grid row.
        count: u32,
        grid_width: u32,
        /// Rows and heads of the window; elements per vector, or pairs of them.
        rows: u32,
        heads: u32,
        dim: u32,
        /// 1: an invocation copies two neighbouring elements, because all offsets are even.
        pairs: u32,
        from: Strided,
        into: Strided,
        factors: Strided,
        factor: f32,
    }
}

params! {
    /// Parameters of the merge of ranges of keys.
    MergeParams {
        /// Rows and workgroups per grid row.
        count: u32,
        grid_width: u32,
        /// Rows of a head; heads; ranges; elements per vector.
        rows: u32,
        heads: u32,
        ranges: u32,
        dim: u32,
        statistics: Strided,
        acc: Strided,
        range_statistics: Strided,
        statistics_range: u32,
        range_acc: Strided,
        acc_range: u32,
    }
}

params! {
    /// Parameters of the row kernels.
    RowParams {
        /// End of the invocations or workgroups; workgroups per grid row.
        count: u32,
        grid_width: u32,
        /// Rows of the window; all rows; first row and batch row of the window.
        rows: u32,
        all_rows: u32,
        row_first: u32,
        batch_first: u32,
        heads: u32,
        value_dim: u32,
        out_base: u32,
        out_row: u32,
        out_batch: u32,
        dout_base: u32,
        sinks: u32,
        sinks_head: u32,
        normalize: u32,
        /// 1: the results are partial.
        partial: u32,
        has_sum: u32,
        has_dlse: u32,
        /// Kernels of sinks: first workgroup of the launch; first and end of its steps.
        group_first: u32,
        step_first: u32,
        step_end: u32,
    }
}

params! {
    /// Parameters of the probe of cooperative matrices.
    ProbeParams {
        /// Steps between elements of the left and the right operand.
        left_step: u32,
        right_step: u32,
        /// Products of a workgroup, one after another.
        rounds: u32,
    }
}

params! {
    /// Parameters of the counting kernel and of the probe of subgroups.
    StepParams {
        /// Batches to count; factor of the shuffled numbers.
        step: u32,
    }
}
