//! The queue of the driver: inputs of the core from every thread, and requests for views of its state.
use crate::views::Views;
use node_core::input::Input;
use std::sync::mpsc;
use std::time::Duration;
use tokio::sync::oneshot;

/// Sends to the driver; cheap to clone, never blocks.
#[derive(Clone)]
pub(crate) struct DriverHandle {
    queue: mpsc::Sender<Event>,
}

/// What the driver handles.
pub(super) enum Event {
    Input(Input),
    /// From the network; dropping the credit lets its sender send more.
    Arrived(Input, transport::Credit),
    Views(oneshot::Sender<Views>),
    StopAfter(Duration),
}

/// The queue of a driver that does not run yet: threads that feed it can be started first.
pub(crate) struct DriverQueue {
    pub(super) events: mpsc::Receiver<Event>,
}

/// Creates the queue.
pub(crate) fn channel() -> (DriverHandle, DriverQueue) {
    let (sender, events) = mpsc::channel();
    (DriverHandle { queue: sender }, DriverQueue { events })
}

impl DriverHandle {
    /// Sends an input to the node. Dropped if the node has stopped.
    pub(crate) fn input(&self, input: Input) {
        let _ = self.queue.send(Event::Input(input));
    }

    /// Sends an input from the network; `credit` is returned once the input is handled.
    pub(crate) fn arrived(&self, input: Input, credit: transport::Credit) {
        let _ = self.queue.send(Event::Arrived(input, credit));
    }

    /// Peers, jobs and simulations in the core's present state; empty if the node has stopped.
    pub(crate) async fn views(&self) -> Views {
        let (answer, views) = oneshot::channel();
        let _ = self.queue.send(Event::Views(answer));
        views.await.unwrap_or_default()
    }

    /// Ends the loop after `delay`, so that outgoing messages can still be sent.
    pub(crate) fn stop_after(&self, delay: Duration) {
        let _ = self.queue.send(Event::StopAfter(delay));
    }
}

#[cfg(test)]
impl DriverQueue {
    /// The next input; `None` if none arrives within `patience`.
    pub(crate) fn next_input(&self, patience: Duration) -> Option<Input> {
        loop {
            match self.events.recv_timeout(patience).ok()? {
                Event::Input(input) | Event::Arrived(input, _) => return Some(input),
                Event::Views(_) | Event::StopAfter(_) => {}
            }
        }
    }

    /// Plays the driver: passes inputs to `each` and answers requests for views, until all handles are dropped.
    pub(crate) fn serve(&self, views: &parking_lot::Mutex<Views>, mut each: impl FnMut(Input)) {
        for event in &self.events {
            match event {
                Event::Input(input) | Event::Arrived(input, _) => each(input),
                Event::Views(answer) => drop(answer.send(views.lock().clone())),
                Event::StopAfter(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use node_core::id::JobId;

    const PATIENCE: Duration = Duration::from_secs(20);

    fn job(input: &Input) -> Option<u64> {
        if let Input::End { job } = input { Some(job.0) } else { None }
    }

    #[test]
    fn inputs_arrive_in_the_order_in_which_they_were_sent() {
        let (driver, queue) = channel();
        let other = driver.clone();
        for number in 0..100 {
            let handle = if number % 2 == 0 { &driver } else { &other };
            handle.input(Input::End { job: JobId(number) });
        }
        let arrived: Vec<u64> = (0..100).filter_map(|_| job(&queue.next_input(PATIENCE)?)).collect();
        assert_eq!(arrived, (0..100).collect::<Vec<u64>>());
    }

    #[tokio::test]
    async fn views_of_a_stopped_node_are_empty() {
        let (driver, queue) = channel();
        drop(queue);
        let views = driver.views().await;
        assert!(views.peers.is_empty() && views.jobs.is_empty() && views.grids.is_empty() && views.tiles.is_empty());
    }

    #[tokio::test]
    async fn a_caller_whose_request_for_views_is_dropped_does_not_wait_forever() {
        let (driver, queue) = channel();
        let asking = tokio::spawn({
            let driver = driver.clone();
            async move { driver.views().await }
        });
        driver.input(Input::Wakeup);
        let next = tokio::task::spawn_blocking(move || (queue.next_input(PATIENCE).is_some(), queue));
        let (arrived, queue) = next.await.unwrap();
        assert!(arrived);
        drop(queue);
        let views = tokio::time::timeout(PATIENCE, asking).await.expect("an answer in time").unwrap();
        assert!(views.peers.is_empty());
    }

    #[test]
    fn a_stopped_node_ignores_inputs() {
        let (driver, queue) = channel();
        drop(queue);
        driver.input(Input::Wakeup);
        driver.stop_after(Duration::ZERO);
    }
}
