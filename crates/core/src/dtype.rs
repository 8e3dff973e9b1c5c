//! Element types of the tensors and what their sums are kept in.

use half::{bf16, f16};
use ndarray::{ArrayView4, ArrayViewMut4};

use crate::{HostView, HostViewMut};

/// The element type of q, k, v, out and their gradients.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum DType {
    /// 64-bit IEEE, summed in f64.
    F64,
    /// 32-bit IEEE, summed in f32.
    F32,
    /// bfloat16, summed in f32.
    Bf16,
    /// 16-bit IEEE, summed in f32.
    F16,
}

impl DType {
    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::F64 => 8,
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// The type that sums, lse, bias, sinks and travelling gradients have: f64 for f64, else f32.
    pub const fn accumulator(self) -> Self {
        match self {
            Self::F64 => Self::F64,
            _ => Self::F32,
        }
    }

    /// The name on the command line and in files: `f64`, `f32`, `bf16`, `f16`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F64 => "f64",
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// Rounds `value` to this type (ties to even) and widens it again.
    pub fn round(self, value: f64) -> f64 {
        match self {
            Self::F64 => value,
            Self::F32 => f32::from_f64(value).to_f64(),
            Self::Bf16 => bf16::from_f64(value).to_f64(),
            Self::F16 => f16::from_f64(value).to_f64(),
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for f64 {}
    impl Sealed for f32 {}
    impl Sealed for half::bf16 {}
    impl Sealed for half::f16 {}
}

/// A Rust type that a tensor can hold.
pub trait Element: sealed::Sealed + bytemuck::Pod + Copy + Send + Sync + PartialEq + std::fmt::Debug + 'static {
    /// The type of its sums, lse, bias and sinks.
    type Accumulator: Element;
    /// Its tag.
    const DTYPE: DType;
    /// Widens exactly.
    fn to_f64(self) -> f64;
    /// Rounds to nearest, ties to even.
    fn from_f64(value: f64) -> Self;
    /// Wraps a tensor for the seam.
    fn view(view: ArrayView4<'_, Self>) -> HostView<'_>;
    /// Wraps a writable tensor for the seam.
    fn view_mut(view: ArrayViewMut4<'_, Self>) -> HostViewMut<'_>;
    /// Unwraps a tensor; `None` if it holds another element type.
    fn array(view: HostView<'_>) -> Option<ArrayView4<'_, Self>>;
    /// Unwraps a writable tensor; `None` if it holds another element type.
    fn array_mut(view: HostViewMut<'_>) -> Option<ArrayViewMut4<'_, Self>>;
}

macro_rules! host_views {
    ($variant:ident) => {
        fn view(view: ArrayView4<'_, Self>) -> HostView<'_> {
            HostView::$variant(view)
        }
        fn view_mut(view: ArrayViewMut4<'_, Self>) -> HostViewMut<'_> {
            HostViewMut::$variant(view)
        }
        fn array(view: HostView<'_>) -> Option<ArrayView4<'_, Self>> {
            if let HostView::$variant(view) = view { Some(view) } else { None }
        }
        fn array_mut(view: HostViewMut<'_>) -> Option<ArrayViewMut4<'_, Self>> {
            if let HostViewMut::$variant(view) = view { Some(view) } else { None }
        }
    };
}

impl Element for f64 {
    type Accumulator = f64;
    const DTYPE: DType = DType::F64;
    host_views!(F64);
    fn to_f64(self) -> f64 {
        self
    }
    fn from_f64(value: f64) -> Self {
        value
    }
}

impl Element for f32 {
    type Accumulator = f32;
    const DTYPE: DType = DType::F32;
    host_views!(F32);
    fn to_f64(self) -> f64 {
        f64::from(self)
    }
    #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is what this does")]
    fn from_f64(value: f64) -> Self {
        value as f32
    }
}

impl Element for bf16 {
    type Accumulator = f32;
    const DTYPE: DType = DType::Bf16;
    host_views!(Bf16);
    fn to_f64(self) -> f64 {
        bf16::to_f64(self)
    }
    fn from_f64(value: f64) -> Self {
        bf16::from_f64(value)
    }
}

impl Element for f16 {
    type Accumulator = f32;
    const DTYPE: DType = DType::F16;
    host_views!(F16);
    fn to_f64(self) -> f64 {
        f16::to_f64(self)
    }
    fn from_f64(value: f64) -> Self {
        f16::from_f64(value)
    }
}
