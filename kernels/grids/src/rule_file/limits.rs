//! What a rule file may hold at most.

/// Maximum bytes of a rule file: a hundred times a page of formulas.
pub const TEXT_BYTES_MAX: usize = 64 << 10;
/// Maximum fields of a rule: each is a full grid.
pub const FIELDS_MAX: usize = 16;
/// Maximum parameters of a rule.
pub const PARAMETERS_MAX: usize = 64;
/// Maximum operations of a rule: what GPU compilers handle in reasonable time.
pub const OPERATIONS_MAX: usize = 1000;
