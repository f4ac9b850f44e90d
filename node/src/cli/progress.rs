//! Progress on stderr: bars on a terminal, a few lines in a log.
use super::print::remark;
use crate::pull::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// A progress bar of work on bytes.
pub(super) struct Bar {
    bar: ProgressBar,
    /// What is done, for logs.
    verb: &'static str,
}

impl Bar {
    /// `verb`: what is done, as in "fetching".
    pub(super) fn new(verb: &'static str) -> Self {
        Self { bar: ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()), verb }
    }

    /// Starts to count steps instead of bytes; [`Progress::at`] sets their number.
    pub(super) fn start_steps(&self, what: &str, total: u64) {
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}");
        self.bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        self.bar.set_message(what.to_owned());
        self.bar.reset();
        self.bar.set_length(total);
        if self.bar.is_hidden() {
            remark(what);
        }
    }
}

impl Progress for Bar {
    fn start(&self, what: &str, from: u64, total: Option<u64>) {
        let template = match total {
            Some(_) => "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} {eta}",
            None => "{msg} {spinner} {bytes} {bytes_per_sec}",
        };
        self.bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        self.bar.set_message(what.to_owned());
        self.bar.reset();
        if let Some(total) = total {
            self.bar.set_length(total);
        }
        self.bar.set_position(from);
        if self.bar.is_hidden() {
            remark(format!("{} {what}", self.verb).trim_start());
        }
    }

    fn at(&self, bytes: u64) {
        self.bar.set_position(bytes);
    }

    fn note(&self, text: &str) {
        self.bar.suspend(|| remark(text));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// A spinner for work of unknown length; removed on drop.
pub(super) struct Spinner(ProgressBar);

impl Spinner {
    pub(super) fn new(text: impl Into<String>) -> Self {
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
        bar.set_style(
            ProgressStyle::with_template("{spinner} {msg} {elapsed}")
                .unwrap_or_else(|_| ProgressStyle::default_spinner()),
        );
        bar.set_message(text.into());
        bar.enable_steady_tick(Duration::from_millis(120));
        Self(bar)
    }

    /// Replaces the text.
    pub(super) fn say(&self, text: String) {
        self.0.set_message(text);
    }
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
