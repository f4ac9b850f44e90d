//! What must hold in every world: one property a file.

pub mod membership;
