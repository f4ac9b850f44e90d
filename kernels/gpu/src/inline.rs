//! CUDA instructions that CubeCL lacks: asynchronous copies to shared memory (`cp.async`), programmatic dependent launch, and
//! permutations of bytes (`prmt`).
//!
//! CubeCL writes kernel comments verbatim into the CUDA source, so code after a `*/` in a comment is compiled. The code refers to
//! variables by the names that CubeCL 0.10 generates; if these change, `tests/compile.rs` fails.
use cubecl::intrinsic;
use cubecl::ir::{NonSemantic, Variable, VariableKind};
use cubecl::prelude::*;

use crate::arithmetic::Features;
use crate::compile::AWAITS;

/// Inserts statements into the CUDA source of a kernel.
fn statement(scope: &mut Scope, code: &str) {
    // CubeCL writes a comment of several lines between `/*` and `*/`.
    scope.register(NonSemantic::Comment { content: format!("\n*/ {code} /*") });
}

/// The name of a variable in the CUDA source.
#[allow(clippy::wildcard_enum_match_arm, reason = "only arrays and numbers are passed")]
fn name(variable: &Variable) -> String {
    match variable.kind {
        VariableKind::GlobalInputArray(id) | VariableKind::GlobalOutputArray(id) => format!("buffer_{id}"),
        VariableKind::SharedArray { id, .. } => format!("shared_memory_{id}"),
        VariableKind::LocalArray { id, .. } => format!("l_arr_{id}"),
        VariableKind::LocalConst { id } => format!("l_{id}"),
        VariableKind::LocalMut { id } => format!("l_mut_{id}"),
        ref other => panic!("{other:?} has no name that is known here"),
    }
}

/// Starts an asynchronous copy of 16 bytes from `from[at ..]` to `to[to_at ..]` (PTX `cp.async`). Both must be 16-byte aligned.
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

/// Commits this unit's copies since the last group as one group.
#[cube]
pub(crate) fn end_group() {
    intrinsic!(|scope| statement(scope, "asm volatile(\"cp.async.commit_group;\" ::: \"memory\");"))
}

/// Waits until all but the latest `pending` groups of this unit's copies are complete.
#[cube]
#[allow(unused_variables, reason = "used in expansion")]
pub(crate) fn wait_groups(#[comptime] pending: usize) {
    intrinsic!(|scope| {
        statement(scope, &format!("asm volatile(\"cp.async.wait_group {pending};\" ::: \"memory\");"));
    })
}

/// Lets the next kernel start as soon as there is room for its cubes; it waits for this one at [`await_previous`].
#[cube]
pub(crate) fn release_next(#[comptime] able: Features) {
    if comptime!(able.matrices) {
        intrinsic!(|scope| on_hopper(scope, "griddepcontrol.launch_dependents"));
    }
}

/// Waits until the preceding kernel is complete and its results are visible. Before this call a kernel must not write, and must
/// not read anything that another kernel writes.
#[cube]
pub(crate) fn await_previous(#[comptime] able: Features) {
    if comptime!(able.matrices) {
        intrinsic!(|scope| on_hopper(scope, AWAITS));
    }
}

/// Looks up the eight nibbles of `word` in a table of 16 bytes: `out[0]` receives the bytes of the low nibbles, `out[1]` those of the
/// high ones.
///
/// `__byte_perm` selects from eight bytes by the low three bits of four nibbles. Their fourth bits then select from the results for
/// both halves of the table.
#[cube]
#[allow(unused_variables, reason = "used in expansion")]
pub(crate) fn look_up_nibbles(word: u32, out: &mut Array<u32>, #[comptime] table: [u32; 4]) {
    intrinsic!(|scope| {
        let [word, out] = [&word.expand, &out.expand].map(|v| name(v));
        let [t0, t1, t2, t3] = table;
        let select = |word: &str| {
            format!(
                "__byte_perm(__byte_perm({t0}u, {t1}u, {word}), __byte_perm({t2}u, {t3}u, {word}), \
                 0x3210u + (({word} & 0x8888u) >> 1))"
            )
        };
        let (first, second) = (select(&word), select(&format!("({word} >> 16)")));
        statement(
            scope,
            &format!(
                "{{ const unsigned int first = {first}, second = {second}; \
                 {out}[0] = __byte_perm(first, second, 0x6420u); {out}[1] = __byte_perm(first, second, 0x7531u); }}"
            ),
        );
    })
}

/// Inserts an instruction for Hopper and later; older cards run kernels one after another.
fn on_hopper(scope: &mut Scope, instruction: &str) {
    let code = format!("\n#if __CUDA_ARCH__ >= 900\nasm volatile(\"{instruction};\" ::: \"memory\");\n#endif\n");
    statement(scope, &code);
}
