//! Turns a panic in one piece of work into an error: the core must always get an answer, and the node keeps running.
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Returns the result of `work`, or of `failed` if it panics; logs the panic.
pub(crate) fn answered<T>(work: impl FnOnce() -> T, failed: impl FnOnce(String) -> T) -> T {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| failed(logged(panic.as_ref())))
}

/// Logs a panic, and returns its text for the answer.
pub(crate) fn logged(panic: &(dyn Any + Send)) -> String {
    let why = format!("internal error on this node ({}). This is a bug: report it with the node's log", text(panic));
    tracing::error!("{why}");
    why
}

/// Runs work of a part on a device; a panic of a kernel becomes an error.
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work))
        .unwrap_or_else(|panic| Err(format!("a kernel panicked: {}", text(panic.as_ref()))))
}

fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_core::id::{CallId, JobId, PartId};
    use node_core::input::Input;
    use node_core::work::QuestionOrigin;
    use node_core::work::steps::SaveKind;
    use partitioner::{Answer, PlanError};

    #[test]
    fn work_that_panics_answers_with_an_error() {
        let asked = QuestionOrigin::Caller(CallId(7));
        let planned = answered(
            || panic!("no layers in {}", "the model"),
            |why| Input::Planned { asked, answer: Answer::Model(Err(PlanError::Invalid(why.into()))) },
        );
        let Input::Planned {
            asked: QuestionOrigin::Caller(CallId(7)),
            answer: Answer::Model(Err(PlanError::Invalid(why))),
        } = &planned
        else {
            panic!("{planned:?}")
        };
        assert!(why.contains("no layers in the model") && why.contains("bug"), "{why}");
        let (job, part, step, kind) = (JobId(1), PartId(2), 3, SaveKind::Checkpoint);
        let collected =
            answered(|| std::panic::panic_any(5), |why| Input::Collected { job, part, step, kind, result: Err(why) });
        assert!(matches!(collected, Input::Collected { result: Err(_), .. }));
        assert!(matches!(answered(|| Input::Wakeup, |_| unreachable!("it did not panic")), Input::Wakeup));
    }

    #[test]
    fn a_kernel_that_panics_is_an_error_with_its_text() {
        let text = |work: fn() -> Result<u8, String>| guarded(work).unwrap_err();
        assert_eq!(text(|| panic!("row {}", 3)), "a kernel panicked: row 3");
        assert_eq!(text(|| panic!("out of range")), "a kernel panicked: out of range");
        assert_eq!(text(|| std::panic::panic_any(5)), "a kernel panicked: no message");
        assert_eq!(text(|| Err("no memory".into())), "no memory", "an error stays as it is");
        assert_eq!(guarded(|| Ok(7)), Ok(7));
    }

    #[test]
    fn work_goes_on_after_a_panic() {
        let mut count = 0;
        for number in 0..4 {
            let done = guarded(|| {
                count += 1;
                if number % 2 == 0 { Ok(number) } else { panic!("odd") }
            });
            assert_eq!(done.is_ok(), number % 2 == 0);
        }
        assert_eq!(count, 4);
    }
}
