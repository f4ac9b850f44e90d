//! What must hold in every world: one property a file.

pub mod bounds;
pub mod epochs;
pub mod membership;
pub mod requests;
