//! The three values that make a plan.

use std::borrow::Borrow;

use annulus_comm::ring::RingOptions;
use annulus_core::{Dims, Result, Spec};

use crate::{Attention, Division, Runtime};

/// What is computed, how the ranks divide it, and how they run.
///
/// Constructors of plans take whatever converts to it: `&attention`, `(&attention, &division)` or
/// `(&attention, &division, &runtime)`, by value or by reference. What is left out has its default.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    /// The mathematics.
    pub attention: Attention,
    /// The division among ranks.
    pub division: Division,
    /// Backend, threads, deadlines and hooks.
    pub runtime: Runtime,
}

impl Setup {
    /// Changes the mathematics.
    #[must_use]
    pub fn map_attention(self, change: impl FnOnce(Attention) -> Attention) -> Self {
        Self { attention: change(self.attention), ..self }
    }

    /// Changes the division among ranks.
    #[must_use]
    pub fn map_division(self, change: impl FnOnce(Division) -> Division) -> Self {
        Self { division: change(self.division), ..self }
    }

    /// Changes the runtime.
    #[must_use]
    pub fn map_runtime(self, change: impl FnOnce(Runtime) -> Runtime) -> Self {
        Self { runtime: change(self.runtime), ..self }
    }

    /// Returns the checked definition for tensors of these lengths, after checking all parameters.
    ///
    /// # Errors
    /// [`annulus_core::Error::InvalidArgument`], which names the parameter.
    pub fn spec(&self, dims: Dims) -> Result<Spec> {
        let spec = self.attention.spec(dims)?;
        self.division.check(&spec)?;
        self.runtime.check()?;
        Ok(spec)
    }

    /// Returns the options of the ring engine, for a [`Ring`](crate::comm::ring::Ring) made by
    /// hand.
    pub fn ring_options(&self) -> RingOptions {
        RingOptions {
            backward: !self.attention.forward_only,
            second_derivatives: self.attention.second_derivatives,
            local_gradients: self.attention.local_gradients,
            ..self.division.ring_options()
        }
    }
}

impl From<Attention> for Setup {
    fn from(attention: Attention) -> Self {
        Self { attention, ..Self::default() }
    }
}

impl From<&Attention> for Setup {
    fn from(attention: &Attention) -> Self {
        attention.clone().into()
    }
}

impl From<&Setup> for Setup {
    fn from(setup: &Setup) -> Self {
        setup.clone()
    }
}

impl<A: Borrow<Attention>, D: Borrow<Division>> From<(A, D)> for Setup {
    fn from((attention, division): (A, D)) -> Self {
        Self {
            attention: attention.borrow().clone(),
            division: division.borrow().clone(),
            ..Self::default()
        }
    }
}

impl<A, D, R> From<(A, D, R)> for Setup
where
    A: Borrow<Attention>,
    D: Borrow<Division>,
    R: Borrow<Runtime>,
{
    fn from((attention, division, runtime): (A, D, R)) -> Self {
        Self {
            attention: attention.borrow().clone(),
            division: division.borrow().clone(),
            runtime: runtime.borrow().clone(),
        }
    }
}
