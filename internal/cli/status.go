package cli

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"maps"
	"slices"
	"time"

	"csi-registrar/internal/core/control"
	"csi-registrar/internal/node/config"
	"csi-registrar/internal/node/status"
	"csi-registrar/internal/node/volumes"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/worker"
)

func setupStatus(fs *flag.FlagSet) runner {
	o := statusOptions{root: rootFlag(fs)}
	fs.BoolVar(&o.json, "json", false, "print the status document as JSON")
	return func(ctx context.Context, e *env, args []string) error {
		if len(args) > 0 {
			o.driver = args[0]
		}
		s, err := control.NewClient(control.Path(*o.root)).Status(ctx)
		if err != nil {
			return clientError(err)
		}
		if err := addVolumes(ctx, *o.root, &s); err != nil {
			s.VolumesError = err.Error()
		}
		if err := o.checkDriver(s); err != nil {
			return err
		}
		unread := notRead(ctx, *o.root, s)
		if o.json {
			if o.driver != "" { // without the others
				s.Drivers = slices.DeleteFunc(s.Drivers, func(d status.Driver) bool { return d.Name != o.driver })
			}
			err = writeJSON(e.stdout, json.RawMessage(control.Marshal(s)), "  ")
		} else {
			_, err = fmt.Fprint(e.stdout, o.text(s, unread, e))
		}
		return errors.Join(err, o.exitError(s, unread, e.now()))
	}
}

type statusOptions struct {
	root   *string
	driver string // if set, show only this driver, with all details
	json   bool
}

// notRead returns what a daemon without drivers has not read in the files, or why that is not
// known; empty: there is nothing.
func notRead(ctx context.Context, root string, s status.Document) string {
	if len(s.Drivers) > 0 || s.ConfigError != "" {
		return ""
	}
	res, err := loadConfig(ctx, config.Source{Root: root})
	if err != nil {
		return err.Error()
	}
	if n := len(res.Config.Drivers); n > 0 {
		return "the daemon has not yet read the files, which configure " + safetext.Count(n, "driver") +
			": try again, or run csi-registrar reload"
	}
	return ""
}

// text formats the table, or one driver with all details, or what is not read.
func (o statusOptions) text(s status.Document, unread string, e *env) string {
	if unread != "" {
		return sentence(unread) + ".\n"
	}
	// The name of a driver that has not reported it yet is empty.
	if d, ok := s.Driver(o.driver); ok && o.driver != "" {
		return driverText(d, s.ConfigError, e.page(), e.now())
	}
	return statusTable(s, e.page(), e.now())
}

func (o statusOptions) checkDriver(s status.Document) error {
	if _, ok := s.Driver(o.driver); ok || o.driver == "" {
		return nil
	}
	err := fmt.Errorf("cannot show %s: no driver of that name is configured", o.driver)
	if s.ConfigError != "" {
		return hinted(err, "the configuration has errors, which may be the reason: csi-registrar config check")
	}
	return hinted(err, "csi-registrar status lists the drivers")
}

// kubeletReturns is how long a restart of the kubelet may take, and the first call of the next one.
const kubeletReturns = 150 * time.Second

// exitError returns nil if everything that is shown is registered and serves, and nothing is
// unread. Otherwise the error has no text, because the document shows the reason.
func (o statusOptions) exitError(s status.Document, unread string, now time.Time) error {
	lost := func(d status.Driver) bool {
		return d.NoTable || s.KubeletEnded(d, now) != "" && now.Sub(s.Kubelet.EndedAt) >= kubeletReturns
	}
	d, ok := s.Driver(o.driver)
	failed := unread != "" || len(s.Unregistered) > 0 || slices.ContainsFunc(s.Drivers, lost) || len(s.Pending())+len(s.Down())+len(s.InvalidFiles) > 0
	if ok && d.State == string(status.Registered) && !d.Down() && !lost(d) || o.driver == "" && !failed {
		return nil
	}
	return &exitError{code: exitFailed}
}

// addVolumes adds the volumes in use to a document. The command counts them, not the daemon, so
// that only the command waits for the kubelet's files.
func addVolumes(ctx context.Context, root string, s *status.Document) error {
	res, err := loadConfig(ctx, config.Source{Root: root})
	if err != nil {
		return err
	}
	kubelet := res.Config.Kubelet
	if s.PluginsRegistry.Checked(func(dir string) bool { return dir == kubelet.PluginsRegistry() }) == "" {
		return nil // it comes from a flag, or the daemon has not read the files
	}
	counts, err := volumes.Count(ctx, worker.NewPool(), kubelet.RootDir, s.Kubelet.PID)
	if counts == nil {
		return err
	}
	for i := range s.Drivers {
		s.Drivers[i].Volumes = new(counts[s.Drivers[i].Name])
		delete(counts, s.Drivers[i].Name)
	}
	if err := volumes.DropRegistered(ctx, worker.NewPool(), kubelet.PluginsRegistry(), counts); err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(counts)) {
		inUse := safetext.Count(counts[name].InUse(), "volume")
		s.Unregistered = append(s.Unregistered, inUse+" of "+safetext.Word(name))
	}
	return err
}

// volumesText formats the number of a driver's volumes; empty if there are none, or it is not
// known.
func volumesText(d status.Driver) string {
	if d.Volumes == nil || *d.Volumes == (status.Volumes{}) {
		return ""
	}
	text := fmt.Sprint(d.Volumes.Published)
	if n := d.Volumes.Waiting; n > 0 {
		text += fmt.Sprintf(", %d waiting", n)
	}
	if n := d.Volumes.Staged; n > 0 {
		text += fmt.Sprintf(", %d staged", n)
	}
	return text
}
