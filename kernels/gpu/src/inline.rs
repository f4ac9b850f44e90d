//! Instructions that CUDA has and CubeCL does not: copies to shared memory that complete in groups, and kernels that begin before the
//! one before them is done.
//!
//! CubeCL writes the comments of a kernel into its CUDA text as they are, so a comment that ends itself is followed by code. Variables
//! have the names there that CubeCL 0.10 gives them: where that changes, `tests/compile.rs` fails.
use cubecl::intrinsic;
use cubecl::ir::{NonSemantic, Variable, VariableKind};
use cubecl::prelude::*;

use crate::arithmetic::Abilities;

/// Puts statements into the CUDA text of a kernel.
fn statement(scope: &mut Scope, code: &str) {
    // CubeCL writes a comment of several lines between `/*` and `*/`.
    scope.register(NonSemantic::Comment { content: format!("\n*/ {code} /*") });
}

/// The name of a variable in CUDA text.
#[allow(clippy::wildcard_enum_match_arm, reason = "copies are between arrays, at numbers")]
fn name(variable: &Variable) -> String {
    match variable.kind {
        VariableKind::GlobalInputArray(id) | VariableKind::GlobalOutputArray(id) => format!("buffer_{id}"),
        VariableKind::SharedArray { id, .. } => format!("shared_memory_{id}"),
        VariableKind::LocalConst { id } => format!("l_{id}"),
        VariableKind::LocalMut { id } => format!("l_mut_{id}"),
        ref other => panic!("{other:?} has no name that is known here"),
    }
}

/// Begins to copy 16 bytes, which must begin at a multiple of 16 bytes in both memories: `cp.async` of PTX. The elements are those of
/// `from` from `at` on.
#[cube]
#[allow(unused_variables, reason = "used in expansion")]
pub(crate) fn begin_copy<T: CubePrimitive>(from: &Array<T>, at: usize, to: &SharedMemory<T>, to_at: usize) {
    intrinsic!(|scope| {
        let [from, at, to, to_at] = [&from.expand, &at.expand, &to.expand, &to_at.expand].map(|v| name(v));
        statement(
            scope,
            &format!(
                "asm volatile(\"cp.async.cg.shared.global [%0], [%1], 16;\" :: \
                 \"r\"((unsigned int)__cvta_generic_to_shared({to} + {to_at})), \"l\"({from} + {at}) : \"memory\");"
            ),
        );
    })
}

/// Ends a group of this unit's copies: those begun since the last group.
#[cube]
pub(crate) fn end_group() {
    intrinsic!(|scope| statement(scope, "asm volatile(\"cp.async.commit_group;\" ::: \"memory\");"))
}

/// Waits until all but the latest `pending` groups of this unit's copies are done.
#[cube]
#[allow(unused_variables, reason = "used in expansion")]
pub(crate) fn wait_groups(#[comptime] pending: usize) {
    intrinsic!(|scope| {
        statement(scope, &format!("asm volatile(\"cp.async.wait_group {pending};\" ::: \"memory\");"));
    })
}

/// What a kernel's text holds if it waits for the kernel before it by itself: only such a kernel may be launched early.
pub(crate) const AWAITS: &str = "griddepcontrol.wait";

/// Lets the next kernel start as soon as there is room for its cubes: it waits for this one where it calls [`await_previous`].
#[cube]
pub(crate) fn release_next(#[comptime] able: Abilities) {
    if comptime!(able.matrices) {
        intrinsic!(|scope| on_hopper(scope, "griddepcontrol.launch_dependents"));
    }
}

/// Waits until the kernel before this one is done and its results are visible. Nothing that another kernel writes may be read before,
/// and nothing may be written.
#[cube]
pub(crate) fn await_previous(#[comptime] able: Abilities) {
    if comptime!(able.matrices) {
        intrinsic!(|scope| on_hopper(scope, AWAITS));
    }
}

/// An instruction that cards have from Hopper on; the others run one kernel after the other.
fn on_hopper(scope: &mut Scope, instruction: &str) {
    let code = format!("\n#if __CUDA_ARCH__ >= 900\nasm volatile(\"{instruction};\" ::: \"memory\");\n#endif\n");
    statement(scope, &code);
}
