//! Progress on stderr: bars on a terminal, a few lines in a log.
use super::print::remark;
use crate::pull::Progress;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// A progress bar for a download.
pub(super) struct Bar(ProgressBar);

impl Bar {
    pub(super) fn new() -> Self {
        Self(ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr()))
    }
}

impl Bar {
    /// Starts to count steps instead of bytes; [`Progress::at`] sets their number.
    pub(super) fn start_steps(&self, what: &str, total: u64) {
        let style = ProgressStyle::with_template("{msg} {wide_bar} {pos}/{len} {eta}");
        self.0.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        self.0.set_message(what.to_owned());
        self.0.reset();
        self.0.set_length(total);
        if self.0.is_hidden() {
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
        self.0.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        self.0.set_message(what.to_owned());
        self.0.reset();
        if let Some(total) = total {
            self.0.set_length(total);
        }
        self.0.set_position(from);
        if self.0.is_hidden() {
            remark(format!("fetching {what}"));
        }
    }

    fn at(&self, bytes: u64) {
        self.0.set_position(bytes);
    }

    fn note(&self, text: &str) {
        self.0.suspend(|| remark(text));
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
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
}

impl Drop for Spinner {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
