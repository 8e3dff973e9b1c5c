//! The numbers that a kernel is given, declared once for both sides.

/// Declares a struct of 4-byte numbers and the same struct in WGSL.
macro_rules! numbers {
    ($(#[$doc:meta])* $name:ident { $($(#[$field_doc:meta])* $field:ident: $kind:ident,)* }) => {
        $(#[$doc])*
        #[repr(C)]
        #[derive(Debug, Clone, Copy, Default, bytemuck::Pod, bytemuck::Zeroable)]
        pub(crate) struct $name {
            $($(#[$field_doc])* pub(crate) $field: $kind,)*
        }

        impl $name {
            /// The same in WGSL.
            pub(crate) const WGSL: &'static str =
                concat!("struct Numbers {\n", $("    ", stringify!($field), ": ", stringify!($kind), ",\n",)* "}\n");
        }
    };
}

numbers! {
    /// Of the kernels over tiles. `*_base` is the place, in elements of its binding, of the window's first element; `*_row`, `*_batch`, `*_head` are
    /// distances.
    TileNumbers {
        /// Batch rows and query heads of the window.
        batch_first: u32,
        batches: u32,
        head_first: u32,
        heads: u32,
        key_head_first: u32,
        key_heads: u32,
        /// Query heads of one key head, and of all.
        heads_a_key: u32,
        all_heads: u32,
        /// Rows of the window.
        queries: u32,
        keys: u32,
        head_dim: u32,
        value_dim: u32,
        /// Tiles of what a workgroup owns; workgroups; and how they are folded.
        tiles: u32,
        groups: u32,
        grid_width: u32,
        /// Where in `sight` the lists begin, and so on.
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
        /// What is summed up: acc, dq, or dk and (more) dv.
        sums_base: u32,
        sums_row: u32,
        sums_batch: u32,
        sums_head: u32,
        more_base: u32,
        more_batch: u32,
        more_head: u32,
        bias_base: u32,
        bias_row: u32,
        bias_batch: u32,
        bias_head: u32,
        bias_keys: u32,
        bias_heads: u32,
        gradient_base: u32,
        gradient_row: u32,
        gradient_batch: u32,
        gradient_head: u32,
        has_bias: u32,
        bias_first: u32,
        normalize: u32,
        /// 0: as it is; 1: bf16; 2: f16.
        logits_dtype: u32,
        /// ⌊p·2³²⌋ of dropout, and Philox's key.
        threshold: u32,
        key_low: u32,
        key_high: u32,
        /// Whether dk and dv are added to what is there.
        add: u32,
        keep_scale: f32,
        scale: f32,
        /// 0: none.
        cap: f32,
    }
}

numbers! {
    /// Of the kernel that copies elements.
    CopyNumbers {
        /// Invocations; workgroups a line of the grid.
        count: u32,
        grid_width: u32,
        /// Rows and heads of the window, and elements of a vector (or pairs of them).
        rows: u32,
        heads: u32,
        dim: u32,
        /// Whether an invocation copies two neighbours at once: everything is even.
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

numbers! {
    /// Of the kernels over rows.
    RowNumbers {
        /// Invocations; workgroups a line of the grid.
        count: u32,
        grid_width: u32,
        /// Rows and batch rows of the window, and all rows.
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
        has_dlse: u32,
    }
}

numbers! {
    /// Of the kernel that shows whether a device multiplies matrices.
    ProbeNumbers {
        /// From one element to the next of either factor.
        left_step: u32,
        right_step: u32,
    }
}
