package config

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"slices"
	"time"

	"csi-registrar/internal/sys/rate"
	"csi-registrar/internal/sys/safetext"
	"csi-registrar/internal/sys/trust"
)

// GracePeriod is how long a setting that disappeared from the files stays in force: an editor, a
// package upgrade or a synchronization tool may put it back.
const GracePeriod = 10 * time.Second

// InForce is a configuration that is in force, or about to be.
type InForce struct {
	*Config
	Files       []string // in the order in which they were applied
	RootDirFile string   // the file that sets kubelet.root_dir; empty: none does
}

// Equal reports whether both have the same settings from the same files.
func (c *InForce) Equal(o *InForce) bool {
	return c.Config.Equal(o.Config) && slices.Equal(c.Files, o.Files) && c.RootDirFile == o.RootDirFile
}

// InForce returns a copy of the configuration in the files, to put it in force.
func (r *Result) InForce() *InForce {
	c := *r.Config
	c.Drivers = slices.Clone(c.Drivers)
	return &InForce{&c, r.Files, r.origins["kubelet.root_dir"].file}
}

// Over returns the valid part of the files, with the drivers of inForce that are missing in it, and
// with the root_dir of inForce: an error must not end a registration.
func (r *Result) Over(inForce *InForce) *InForce {
	c := r.InForce()
	c.Kubelet, c.RootDirFile = inForce.Kubelet, inForce.RootDirFile
	for _, d := range inForce.Drivers {
		if _, ok := r.Config.Driver(d.Name); !ok && successor(r.Config, d) < 0 {
			c.Drivers = append(c.Drivers, d)
		}
	}
	sortByName(c.Drivers)
	return c
}

// RejectRootDir adds an error about the root_dir in the files, which cannot replace that of
// inForce.
func (r *Result) RejectRootDir(inForce *InForce, problem, hint string) {
	at, ok := r.origins["kubelet.root_dir"]
	if !ok {
		at = position{file: inForce.RootDirFile, path: []string{"kubelet", "root_dir"}, id: "kubelet.root_dir"}
	}
	r.Errors = append(r.Errors, at.error(problem, hint))
}

// RejectRenamed leaves out, with an error, each table with the socket of a driver of inForce that
// has no table any more, but must stay: without its registration the kubelet cannot unmount its
// volumes, and only one of the two can have the socket. It reports whether there was one.
func (r *Result) RejectRenamed(inForce *InForce, mustStay func(name string) string) (rejected bool) {
	for _, d := range inForce.Drivers {
		i := successor(r.Config, d)
		if _, ok := r.Config.Driver(d.Name); ok || !d.Enabled || i < 0 {
			continue
		}
		if why := mustStay(d.Name); why != "" {
			name := r.Config.Drivers[i].Name
			r.Errors = append(r.Errors, r.origins[keyString("driver", name, "socket")].error(
				fmt.Sprintf("replaces that of %s, which stays registered: %s", d.Name, why), "write ["+keyString("driver", d.Name)+"] until then"))
			r.Faulty = append(r.Faulty, name)
			r.Config.Drivers = slices.Delete(r.Config.Drivers, i, i+1)
			rejected = true
		}
	}
	return rejected
}

// Grace keeps a driver's table in force for a grace period after it disappeared from the files, and
// root_dir after its file did. Everything that is still in the files takes effect at once, for
// example enabled = false. A driver that must stay longer, because the kubelet cannot unmount its
// volumes without the registration, gets one grace period after another. It has one owner.
type Grace struct {
	Period  time.Duration        // GracePeriod, except in tests
	drivers map[string]time.Time // the end of the grace period of each driver that disappeared
	rootDir time.Time            // the same for root_dir; zero: it did not disappear
}

// Kept is the result of Grace.Keep.
type Kept struct {
	*InForce              // to put in force
	Disappeared []string  // drivers that disappeared since the previous call
	Staying     []Driver  // drivers that must stay longer, as of this call
	RootDir     bool      // root_dir disappeared since the previous call
	Next        time.Time // the end of the first grace period; zero: there is none
}

// Keep returns the configuration in the files, which have no errors, with what disappeared from
// them within the grace period. inForce is the previous configuration, perhaps of another process.
// With atOnce, the grace periods end now. mustStay returns why a driver must stay after its grace
// period; empty: it need not.
func (g *Grace) Keep(inForce *InForce, r *Result, now time.Time, atOnce bool, mustStay func(name string) string) Kept {
	k := Kept{InForce: r.InForce()}
	c := k.Config
	until := func(end time.Time) (_ time.Time, keep bool) {
		if end.IsZero() {
			end = now.Add(g.Period)
		}
		if atOnce || !now.Before(end) {
			return now, false
		}
		k.Next = rate.Earliest(k.Next, end)
		return end, true
	}

	file := inForce.RootDirFile
	if c.Kubelet == inForce.Kubelet || file == "" || slices.Contains(r.Files, file) {
		g.rootDir = time.Time{}
	} else if end, keep := until(g.rootDir); keep {
		k.RootDir = g.rootDir.IsZero()
		g.rootDir, c.Kubelet, k.RootDirFile = end, inForce.Kubelet, file
	}

	kept := make(map[string]time.Time)
	for _, d := range inForce.Drivers {
		if _, ok := r.Config.Driver(d.Name); ok || !d.Enabled || successor(r.Config, d) >= 0 {
			continue
		}
		end, ok := g.drivers[d.Name]
		if !ok && !atOnce {
			k.Disappeared = append(k.Disappeared, d.Name)
		}
		end, keep := until(end)
		if !keep {
			before := d.KeptFor
			if d.KeptFor = mustStay(d.Name); d.KeptFor == "" {
				continue
			}
			if before == "" {
				k.Staying = append(k.Staying, d)
			}
			end = now.Add(g.Period)
			k.Next = rate.Earliest(k.Next, end)
		}
		kept[d.Name] = end
		c.Drivers = append(c.Drivers, d)
	}
	g.drivers = kept
	sortByName(c.Drivers)
	return k
}

// successor returns the index of the driver that now has the socket of d, which was renamed; -1:
// there is none.
func successor(c *Config, d Driver) int {
	return slices.IndexFunc(c.Drivers, func(o Driver) bool {
		return o.Enabled && (o.Socket == d.Socket || o.Endpoint == d.Endpoint)
	})
}

// lastGoodFormat is the version of the file format.
const lastGoodFormat = 3

type lastGood struct {
	Format int
	*InForce
}

// SaveLastGood saves the configuration in force, for a start at which the files have an error or
// something disappeared from them. It replaces the file atomically, with mode 0600, unless it has
// the same content. The directory must exist.
func SaveLastGood(path string, c *InForce) error {
	data, err := json.MarshalIndent(lastGood{lastGoodFormat, c}, "", "  ")
	if err != nil {
		return fmt.Errorf("cannot keep the last good configuration: %w", err)
	}
	if old, err := os.ReadFile(path); err == nil && bytes.Equal(old, data) {
		return nil
	}
	// there is one writer; /run is in memory, so there is nothing to sync
	temporary := path + ".new"
	if err = os.WriteFile(temporary, data, 0o600); err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return fmt.Errorf("cannot keep the last good configuration: %w", errors.Join(err, os.Remove(temporary)))
	}
	return nil
}

// LoadLastGood returns the configuration saved by SaveLastGood. The error is fs.ErrNotExist if
// there is none. A file that is damaged, untrusted or has another format is an error.
func LoadLastGood(path string) (*InForce, error) {
	data, err := trust.Rule{Owners: []uint32{0, uint32(os.Geteuid())}}.ReadFile(path, 16*maxFile)
	if err != nil {
		return nil, fmt.Errorf("cannot use the last good configuration: %w", err)
	}
	var c lastGood
	if err := json.Unmarshal(data, &c); err != nil || c.Format != lastGoodFormat || c.InForce == nil || c.Config == nil {
		return nil, fmt.Errorf("cannot use the last good configuration: %s is damaged, or of a format that this version does not know", safetext.Word(path))
	}
	return c.InForce, nil
}
