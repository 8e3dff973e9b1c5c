//! Uniform parameters of the kernels, declared once for Rust and WGSL.

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
                $("    ", stringify!($field), ": ", stringify!($kind), ",\n",)*
                "}\n"
            );
        }
    };
}

params! {
    /// Parameters of the tile kernels. `*_base` is the offset of the chunk's first element in its
    /// binding, in elements; `*_row`, `*_batch`, `*_head` are strides.
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
        q_base: u32,
        q_row: u32,
        q_batch: u32,
        q_head: u32,
        k_base: u32,
        k_row: u32,
        k_batch: u32,
        k_head: u32,
        v_base: u32,
        v_row: u32,
        v_batch: u32,
        v_head: u32,
        dout_base: u32,
        dout_row: u32,
        dout_batch: u32,
        dout_head: u32,
        statistics_base: u32,
        statistics_row: u32,
        statistics_batch: u32,
        statistics_head: u32,
        statistics_range: u32,
        /// Accumulators: of O, dQ or dK, and of dV.
        acc_base: u32,
        acc_row: u32,
        acc_batch: u32,
        acc_head: u32,
        acc_range: u32,
        dv_base: u32,
        dv_batch: u32,
        dv_head: u32,
        bias_base: u32,
        bias_row: u32,
        bias_batch: u32,
        bias_head: u32,
        bias_keys: u32,
        bias_heads: u32,
        dbias_base: u32,
        dbias_row: u32,
        dbias_batch: u32,
        dbias_head: u32,
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
        from_base: u32,
        from_row: u32,
        from_batch: u32,
        from_head: u32,
        into_base: u32,
        into_row: u32,
        into_batch: u32,
        into_head: u32,
        factors_base: u32,
        factors_row: u32,
        factors_batch: u32,
        factors_head: u32,
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
        statistics_base: u32,
        statistics_row: u32,
        statistics_batch: u32,
        statistics_head: u32,
        acc_base: u32,
        acc_row: u32,
        acc_batch: u32,
        acc_head: u32,
        range_statistics_base: u32,
        range_statistics_row: u32,
        range_statistics_batch: u32,
        range_statistics_head: u32,
        statistics_range: u32,
        range_acc_base: u32,
        range_acc_row: u32,
        range_acc_batch: u32,
        range_acc_head: u32,
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
