//! Identifies a process by its id and start time: ids alone are reused.
use serde::{Deserialize, Serialize};

/// A process on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Process {
    /// Its id.
    pub pid: u32,
    /// Its start time, in clock ticks since boot; `None` if the system does not report it.
    pub started: Option<u64>,
}

/// The current process.
pub(crate) fn own() -> Process {
    let pid = std::process::id();
    Process { pid, started: stat(pid).map(|s| s.started) }
}

impl Process {
    /// Whether the process runs. A zombie whose threads have all ended does not: it holds no files and no ports.
    pub(crate) fn runs(&self) -> bool {
        if let Some(started) = self.started {
            return stat(self.pid).is_some_and(|s| s.started == started && s.runs());
        }
        let pid = i32::try_from(self.pid).ok().and_then(rustix::process::Pid::from_raw);
        pid.is_some_and(|pid| rustix::process::test_kill_process(pid).is_ok())
    }
}

/// Fields of `/proc/PID/stat` (`man 5 proc_pid_stat`).
#[derive(Debug)]
struct Stat {
    /// State of the first thread.
    state: char,
    threads: u64,
    /// Clock ticks since boot.
    started: u64,
}

impl Stat {
    /// The first thread can be a zombie while others still hold the files of the process.
    fn runs(&self) -> bool {
        match self.state {
            'X' => false,
            'Z' => self.threads > 1,
            _ => true,
        }
    }
}

fn stat(pid: u32) -> Option<Stat> {
    parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

fn parse(text: &str) -> Option<Stat> {
    // The process name may contain spaces and parentheses: parse after its last `)`. Reads fields 3, 20 and 22.
    let mut fields = text.get(text.rfind(')')? + 1..)?.split_ascii_whitespace();
    let state = fields.next()?.chars().next()?;
    let threads = fields.nth(16)?.parse().ok()?;
    Some(Stat { state, threads, started: fields.nth(1)?.parse().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_runs_until_it_has_ended_even_before_it_is_waited_for() {
        assert!(own().runs());
        let mut child = std::process::Command::new("cat").stdin(std::process::Stdio::piped()).spawn().unwrap();
        let pid = child.id();
        let process = Process { pid, started: stat(pid).map(|s| s.started) };
        assert!(process.runs());
        drop(child.stdin.take());
        if process.started.is_some() {
            while process.runs() {
                std::thread::sleep(std::time::Duration::from_millis(5));
            }
        }
        child.wait().unwrap();
        assert!(!process.runs());
        assert!(!Process { started: Some(1), ..own() }.runs(), "another process with the same id");
    }
    #[test]
    fn a_process_runs_while_one_of_its_threads_does() {
        let line = |state: char, threads: u64| {
            format!("7 (a) b) {state} 1 7 7 0 -1 4194560 0 0 0 0 1 2 0 0 20 0 {threads} 0 4711 0 0")
        };
        let ended = |state, threads| !parse(&line(state, threads)).unwrap().runs();
        assert_eq!(parse(&line('S', 3)).unwrap().started, 4711);
        assert!(!ended('S', 1) && !ended('Z', 2));
        assert!(ended('Z', 1) && ended('X', 0));
        assert!(parse("7 (cut").is_none() && parse("7 (cut) S 1 7").is_none());
    }
}
