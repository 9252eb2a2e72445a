//! A simulated client process: provides the client's connections, tasks and random numbers, and can be stopped or
//! killed.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

use redlatch::simulation::{self, Connecting, Inside, Task};
use redlatch_robustness::random::Random;
use tokio::task::JoinHandle;

use crate::network::{Network, ProcessId};

/// A process.
#[derive(Debug)]
pub struct Process {
    id: ProcessId,
    network: Network,
    random: Mutex<Random>,
    next_owner: AtomicU64,
    state: Mutex<State>,
    /// Present if ready tasks run in a random order.
    order: Mutex<Option<Random>>,
    tasks: Mutex<Tasks>,
}

/// The tasks of a process, and the number above which the ended ones are removed.
#[derive(Default)]
struct Tasks {
    all: Vec<Weak<dyn Task>>,
    limit: usize,
}

#[derive(Debug)]
enum State {
    Running,
    /// As after SIGSTOP: its tasks run again when it continues.
    Stopped(Vec<Waker>),
    /// As after SIGKILL: its tasks never run again.
    Dead,
}

impl Process {
    /// Starts a process without tasks.
    pub fn start(id: ProcessId, seed: u64, network: &Network) -> Arc<Process> {
        let mut random = Random::new(seed);
        // Drawn from the same range as in the library: a restarted process has other numbers.
        let first_owner = 1 + (random.next_u64() >> 12);
        Arc::new(Process {
            id,
            network: network.clone(),
            random: Mutex::new(random),
            next_owner: AtomicU64::new(first_owner),
            state: Mutex::new(State::Running),
            order: Mutex::default(),
            tasks: Mutex::default(),
        })
    }

    /// Returns its number.
    pub fn id(&self) -> ProcessId {
        self.id
    }

    /// Runs work in a task of this process.
    pub fn spawn<F: Future<Output: Send> + Send + 'static>(
        self: &Arc<Self>,
        work: F,
    ) -> JoinHandle<F::Output> {
        tokio::spawn(Inside::new(Some(self.clone()), work))
    }

    /// Lets ready tasks run in a random order, as several threads would.
    pub fn shuffle_tasks(&self, seed: u64) {
        *self.order() = Some(Random::new(seed));
    }

    /// Stops the process.
    pub fn stop(&self) {
        let mut state = self.state();
        if matches!(*state, State::Running) {
            *state = State::Stopped(Vec::new());
        }
    }

    /// Continues the process.
    pub fn resume(&self) {
        let mut state = self.state();
        if let State::Stopped(wakers) = &mut *state {
            let wakers = std::mem::take(wakers);
            *state = State::Running;
            drop(state);
            wakers.into_iter().for_each(Waker::wake);
        }
    }

    /// Kills the process.
    pub fn kill(&self) {
        *self.state() = State::Dead;
        self.network.process_died(self.id);
    }

    /// Ends the runtime of the process, which drops all tasks. The process does nothing else.
    pub fn drop_runtime(&self) {
        *self.state() = State::Dead;
        loop {
            let tasks = std::mem::take(&mut self.tasks().all);
            if tasks.is_empty() {
                break;
            }
            tasks
                .iter()
                .filter_map(Weak::upgrade)
                .for_each(|task| task.end());
        }
    }

    /// Returns whether it was killed.
    pub fn is_dead(&self) -> bool {
        matches!(*self.state(), State::Dead)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn order(&self) -> MutexGuard<'_, Option<Random>> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn tasks(&self) -> MutexGuard<'_, Tasks> {
        self.tasks.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl std::fmt::Debug for Tasks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} tasks", self.all.len())
    }
}

impl simulation::Process for Process {
    fn connect(&self, host: &str, port: u16) -> Connecting {
        self.network.connect(self.id, host, port)
    }

    fn random(&self) -> u128 {
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        u128::from(random.next_u64()) << 64 | u128::from(random.next_u64())
    }

    fn owner_number(&self) -> u64 {
        self.next_owner.fetch_add(1, Ordering::Relaxed)
    }

    fn poll_runs(&self, cx: &mut Context<'_>) -> Poll<()> {
        match &mut *self.state() {
            State::Running => {
                if self.order().as_mut().is_some_and(|order| order.one_in(3)) {
                    // Behind all tasks that are ready now.
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Poll::Ready(())
            }
            State::Stopped(wakers) => {
                wakers.push(cx.waker().clone());
                Poll::Pending
            }
            State::Dead => Poll::Pending,
        }
    }

    fn spawned(&self, task: Weak<dyn Task>) {
        let mut tasks = self.tasks();
        if tasks.all.len() >= tasks.limit {
            tasks.all.retain(|task| task.strong_count() > 0);
            tasks.limit = 100 + 2 * tasks.all.len();
        }
        tasks.all.push(task);
    }
}
