//! Semaphores.

use redlatch::{Client, Expiry, PermitGuard, PermitId};
use serde_json::{Value, json};

use crate::settings::millis;
use crate::{Result, unknown_command};

/// Runs a command on a semaphore.
pub(crate) async fn run(client: &Client, command: &str, args: &[&str]) -> Result<Value> {
    let [name, args @ ..] = args else {
        return Err(format!("{command} needs a name").into());
    };
    let semaphore = client.semaphore(name);
    Ok(match (command, args) {
        ("set-permits", [n]) => semaphore.try_set_permits(n.parse()?).await?.into(),
        ("set-permits-for", [n, ttl]) => {
            let setting = semaphore.try_set_permits(n.parse()?);
            setting.time_to_live(millis(ttl)?).await?.into()
        }
        ("acquire", [n, wait]) => {
            let n = n.parse()?;
            let permits = match *wait {
                "-1" => Some(semaphore.acquire_many(n).await?),
                "0" => semaphore.try_acquire_many(n).await?,
                wait => semaphore.try_acquire_many(n).wait(millis(wait)?).await?,
            };
            let acquired = permits.is_some();
            if let Some(permits) = permits {
                permits.forget();
            }
            acquired.into()
        }
        ("release", [n]) => {
            semaphore.release(n.parse()?).await?;
            true.into()
        }
        ("release-if-exists", [n]) => semaphore.release_if_exists(n.parse()?).await?.into(),
        ("add-permits", [n]) => {
            semaphore.add_permits(n.parse()?).await?;
            true.into()
        }
        ("drain", []) => semaphore.drain().await?.into(),
        ("available", []) => semaphore.available().await?.into(),
        _ => return Err(unknown_command(command, args)),
    })
}

/// The permits of expirable semaphores that the watchdog renews.
#[derive(Default)]
pub(crate) struct Permits {
    renewed: Vec<PermitGuard>,
}

impl Permits {
    /// Runs a command on an expirable semaphore.
    pub(crate) async fn run(
        &mut self,
        client: &Client,
        command: &str,
        args: &[&str],
    ) -> Result<Value> {
        let [name, args @ ..] = args else {
            return Err(format!("{command} needs a name").into());
        };
        let semaphore = client.expirable_semaphore(name);
        Ok(match (command, args) {
            ("x-set-permits", [n]) => semaphore.try_set_permits(n.parse()?).await?.into(),
            ("x-resize", [n]) => {
                semaphore.set_permits(n.parse()?).await?;
                true.into()
            }
            ("x-add-permits", [n]) => {
                semaphore.add_permits(n.parse()?).await?;
                true.into()
            }
            ("x-acquire", [n, wait, lease]) => {
                let n = n.parse()?;
                let renewed = *lease == "-1";
                let guard = match *wait {
                    "-1" if renewed => Some(semaphore.acquire_many(n).await?),
                    "-1" => Some(semaphore.acquire_many(n).lease(millis(lease)?).await?),
                    wait => {
                        let request = semaphore.try_acquire_many(n).wait(millis(wait)?);
                        match renewed {
                            true => request.await?,
                            false => request.lease(millis(lease)?).await?,
                        }
                    }
                };
                let ids = match guard {
                    None => Vec::new(),
                    Some(guard) if renewed => {
                        let ids = guard.ids();
                        self.renewed.push(guard);
                        ids
                    }
                    Some(guard) => guard.into_ids()?,
                };
                ids.iter().map(PermitId::to_string).collect()
            }
            ("x-release", [ids]) => {
                let ids = self.detach(ids)?;
                semaphore.release_many(&ids).await?;
                true.into()
            }
            ("x-try-release", [ids]) => {
                let ids = self.detach(ids)?;
                semaphore.try_release_many(&ids).await?.into()
            }
            ("x-update-lease", [id, lease]) => {
                let id = id.parse()?;
                semaphore.update_lease(id, millis(lease)?).await?.into()
            }
            ("x-lease", [id]) => match semaphore.lease_of(id.parse()?).await? {
                None => return Err("this permit is not acquired".into()),
                Some(Expiry::Never) => json!(-1),
                Some(Expiry::In(left)) => json!(left.as_millis() as u64),
            },
            ("x-available", []) => semaphore.available().await?.into(),
            ("x-acquired", []) => semaphore.acquired().await?.into(),
            ("x-total", []) => semaphore.total().await?.into(),
            _ => return Err(unknown_command(command, args)),
        })
    }

    /// Parses ids. If this worker has guards of these permits, ends their renewal without releasing them.
    fn detach(&mut self, ids: &str) -> Result<Vec<PermitId>> {
        let ids: Vec<PermitId> = ids.split(',').map(str::parse).collect::<Result<_, _>>()?;
        let ours = |guard: &PermitGuard| guard.ids().iter().any(|id| ids.contains(id));
        for guard in self.renewed.extract_if(.., |guard| ours(guard)) {
            // An error here occurs again at the release.
            let _ = guard.into_ids();
        }
        Ok(ids)
    }
}
