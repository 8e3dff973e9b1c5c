//! The backend against the oracle: every feature, every type, any split into blocks; and what must not depend on threads.

mod features;
mod support;
